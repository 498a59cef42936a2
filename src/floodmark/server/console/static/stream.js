// The stream of events, by fetch: an EventSource cannot send the token in a header.  The token is kept for
// this tab alone, and travels in no URL: a link may bring it behind #, which browsers do not send.

const TOKEN = "floodmark-token";
const AGAIN_MS = 1000;

export function takeTokenFromLink() {
  const found = new URLSearchParams(location.hash.slice(1)).get("token");
  if (found) {
    sessionStorage.setItem(TOKEN, found);
    history.replaceState(null, "", location.pathname);
  }
}

export function keepToken(token) {
  if (token) sessionStorage.setItem(TOKEN, token);
  else sessionStorage.removeItem(TOKEN);
}

export function ask(path, options = {}) {
  const token = sessionStorage.getItem(TOKEN);
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  return fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
}

// Call a handler for each event, for ever: after a break it connects again.  Returns when a token is missing.
export async function follow(handlers) {
  for (;;) {
    try {
      const answer = await ask("api/events");
      if (answer.status === 401 || answer.status === 403) {
        handlers.refused((await answer.json()).error, answer.status);
        return;
      }
      if (answer.ok) await read(answer.body, handlers);
    } catch {
      // A connection that broke, or a server that is not there.
    }
    handlers.broken();
    await new Promise((resume) => setTimeout(resume, AGAIN_MS));
  }
}

async function read(body, handlers) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const [, name, data] = /^event: (.*)\ndata: (.*)$/s.exec(event) ?? [];
      if (name) handle(handlers[name], data);
    }
  }
}

// What one event cannot draw must not end the stream.
function handle(handler, data) {
  try {
    handler?.(JSON.parse(data));
  } catch (error) {
    console.error(error);
  }
}
