/** What the page asks of the server. */

/** An answer that was not what was asked for; `status` is HTTP's, 0 if there was none. */
export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

async function ask(path, key, options = {}) {
  const headers = { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) };
  const response = await fetch(path, { ...options, headers }).catch((error) => {
    throw error.name === "AbortError" ? error : new ApiError("the server cannot be reached");
  });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new ApiError(body?.error?.message ?? `the server answered ${response.status}`, response.status);
}

/** The model that is served: its `id`, `max_model_len` and `block_size`. */
export async function model(key) {
  return (await (await ask("v1/models", key)).json()).data[0];
}

/**
 * The events of one text as it is written: objects with `choices`, `decoding` or `usage`.
 *
 * @param {object} request what docs/serving.md calls a request, with `messages` or a `prompt`
 * @param {AbortSignal} signal ends the request, and with it the writing
 */
export async function* write(request, key, signal) {
  const body = { ...request, stream: true, stream_options: { include_usage: true } };
  const path = request.messages ? "v1/chat/completions" : "v1/completions";
  const response = await ask(path, key, { method: "POST", body: JSON.stringify(body), signal });
  for await (const data of serverSentEvents(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(event.error.message);
    yield event;
  }
  throw new ApiError("the answer broke off");
}

async function* serverSentEvents(bytes) {
  const reader = bytes.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const events = (held + part.value).split("\n\n");
    held = events.pop();
    for (const event of events) yield event.replace(/^data: /, "");
  }
}
