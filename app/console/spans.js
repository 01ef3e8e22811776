// What a timeline's spans mean, and how they are laid out. Pure functions.

const KINDS = {
  queued: "wait",
  bootstrap: "wait",
  admit: "wait",
  prefill: "compute",
  chunk: "compute",
  decode: "compute",
  send: "move",
  transfer: "move",
};
const TITLES = { chunk: "Chunks", send: "Layer groups sent" };

/** What a span does: `wait`, `compute`, `move`, or `other`. */
export function kindOf(name) {
  return KINDS[name] ?? "other";
}

export function titleOf(name) {
  return TITLES[name] ?? name.charAt(0).toUpperCase() + name.slice(1).replaceAll("_", " ");
}

/** One lane per attempt, process and name, in order of their beginnings; a span without an end lasts until `nowMs`.
 * `depth` counts the parents of a lane's first span. */
export function lanesOf(spans, nowMs) {
  const lanes = new Map();
  for (const span of spans) {
    const key = [span.attempt, span.process, span.name].join("/");
    if (!lanes.has(key)) {
      const { attempt, process, name } = span;
      lanes.set(key, { key, attempt, process, name, kind: kindOf(name), depth: depthOf(spans, span), spans: [] });
    }
    const open = span.end_ms === null;
    lanes.get(key).spans.push({ ...span, open, end_ms: open ? Math.max(span.start_ms, nowMs) : span.end_ms });
  }
  const found = [...lanes.values()];
  for (const lane of found) {
    lane.spans.sort((a, b) => a.start_ms - b.start_ms);
    lane.start_ms = lane.spans[0].start_ms;
    lane.busy_ms = covered(lane.spans);
  }
  return found.sort((a, b) => a.attempt - b.attempt || a.start_ms - b.start_ms || a.depth - b.depth);
}

function depthOf(spans, span) {
  let depth = 0;
  for (let at = span.parent; at !== null && at !== undefined && spans[at] && depth < 4; at = spans[at].parent) depth += 1;
  return depth;
}

/** How long at least one of these ran; they are sorted by their beginnings. */
function covered(spans) {
  let [sum, until] = [0, -Infinity];
  for (const { start_ms: start, end_ms: end } of spans) {
    sum += Math.max(0, end - Math.max(start, until));
    until = Math.max(until, end);
  }
  return sum;
}

/** The end of what is shown: of all, or a little after decode began, where the relay is over. */
export function endOf(lanes, whole) {
  const last = Math.max(1, ...lanes.flatMap((lane) => lane.spans.map((span) => span.end_ms)));
  const decodes = lanes.filter((lane) => lane.name === "decode").map((lane) => lane.start_ms);
  return whole || !decodes.length ? last : Math.min(last, Math.max(...decodes) * 1.15 + 1);
}

/** About `most` round steps on an axis of `length`. */
export function stepOf(length, most) {
  const rough = length / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find((each) => each * power >= rough);
}
