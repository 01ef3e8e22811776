// The tokens of a request as they come: server-sent events over fetch, since EventSource sends no key.

import { Problem, ask } from "./api.js";

const PATIENCE_MS = 1_000;

/** Yields `{name, data}` until the end is among them, through breaks of the connection, each token once. Throws
 * Problem for what no retry mends, and what ends by `signal`. */
export async function* follow(requestId, signal) {
  const path = `/v1/requests/${encodeURIComponent(requestId)}/stream`;
  let seen = 0;
  for (;;) {
    try {
      const response = await ask("GET", path, { headers: { "Last-Event-ID": String(seen) }, signal });
      for await (const event of eventsOf(response.body)) {
        if (event.name === "error") {
          const { message, code } = event.data.error;
          throw new Problem("refused", message, { code });
        }
        if (event.id) seen = Number(event.id);
        yield event;
        if (event.name === "end") return;
      }
    } catch (problem) {
      if (signal.aborted) throw problem;
      const broken = !(problem instanceof Problem);
      if (!broken && problem.kind !== "away") throw problem;
    }
    await pause(PATIENCE_MS, signal);
  }
}

async function* eventsOf(body) {
  let left = "";
  for await (const text of body.pipeThrough(new TextDecoderStream())) {
    const blocks = (left + text).split("\n\n");
    left = blocks.pop();
    for (const block of blocks) {
      const event = eventOf(block);
      if (event) yield event;
    }
  }
}

function eventOf(block) {
  let [name, id, data] = ["token", null, null];
  for (const line of block.split("\n")) {
    const [field, value] = [line.slice(0, line.indexOf(": ")), line.slice(line.indexOf(": ") + 2)];
    if (field === "event") name = value;
    else if (field === "id") id = value;
    else if (field === "data") data = value;
  }
  return data === null ? null : { name, id, data: JSON.parse(data) };
}

function pause(ms, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => (clearTimeout(timer), reject(signal.reason)), { once: true });
  });
}
