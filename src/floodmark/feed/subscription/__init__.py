"""Durable subscriptions: deliveries, acknowledgements and pending acknowledgements."""
