"""The site over RESP, the protocol of Redis (`docs/resp.md`)."""
