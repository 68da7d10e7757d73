// The server's API, as any client would use it.

const KEY = "paceline-key";

function headers(more) {
  const key = sessionStorage.getItem(KEY);
  return key ? { ...more, Authorization: `Bearer ${key}` } : { ...more };
}

export class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Where the server is unreachable, `fetch` throws a TypeError; what it answers with an error is a Refusal. */
export const unreachable = (error) => error instanceof TypeError;

async function refusal(response) {
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error.message;
  } catch { /* no JSON: the status has to do */ }
  return new Refusal(response.status, message);
}

export async function models() {
  const response = await fetch("v1/models", { headers: headers() });
  if (response.status === 401) {
    const key = prompt("This server asks for its API key");
    if (key) {
      sessionStorage.setItem(KEY, key);
      return models();
    }
  }
  if (!response.ok) throw await refusal(response);
  return (await response.json()).data;
}

/**
 * Ask for an answer and hand over each event as it comes.
 * @param {object} body of /v1/chat/completions
 * @param {AbortSignal} signal ends the request, on the server too
 * @param {(event: object) => void} take
 */
export async function stream(body, signal, take) {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    signal,
    headers: headers({ "Content-Type": "application/json" }),
    body: JSON.stringify({ ...body, stream: true, return_token_sources: true }),
  });
  if (!response.ok) throw await refusal(response);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new Refusal(500, event.error.message);
    take(event);
  }
  throw new TypeError("the connection ended before the answer did");
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
  }
}
