// What a timeline's spans mean, and how they are laid out. Pure functions.

const KINDS = {
  prefill: "compute",
  chunk: "compute",
  decode: "compute",
  transfer: "move",
  send: "move",
  seal: "move",
  released: "event",
};
const TITLES = { chunk: "Chunks", send: "Layer groups", wait: "Wait for a step" };

/** What goes on in a span: `compute`, `move` (of KV), `event`, or `wait` for something else. */
export function kindOf(name) {
  return KINDS[name] ?? "wait";
}

export function titleOf(name) {
  return TITLES[name] ?? name.charAt(0).toUpperCase() + name.slice(1).replaceAll("_", " ");
}

/** One lane per attempt, process, name and parent: in order of their beginnings, and each behind its parent, `depth`
 * levels down; `holds` says that others are inside. A span without an end lasts until `nowMs`. */
export function lanesOf(spans, nowMs) {
  const lanes = new Map();
  for (const span of spans) {
    const key = keyOf(span, spans);
    if (!lanes.has(key)) lanes.set(key, laneOf(key, span, spans));
    const open = span.end_ms === null;
    lanes.get(key).spans.push({ ...span, open, end_ms: open ? Math.max(span.start_ms, nowMs) : span.end_ms });
  }
  const found = [...lanes.values()];
  for (const lane of found) {
    lane.spans.sort((a, b) => a.start_ms - b.start_ms);
    lane.start_ms = lane.spans[0].start_ms;
    lane.busy_ms = covered(lane.spans);
  }
  found.sort((a, b) => a.attempt - b.attempt || a.start_ms - b.start_ms);
  return behindParents(found, found.filter((lane) => lane.inside === null), 0);
}

function keyOf({ attempt, process, name, parent }, spans) {
  return [spans[parent] ? keyOf(spans[parent], spans) : attempt, process, name].join("/");
}

function laneOf(key, { attempt, process, name, parent }, spans) {
  const inside = spans[parent] ? keyOf(spans[parent], spans) : null;
  return { key, attempt, process, name, kind: kindOf(name), inside, spans: [] };
}

function behindParents(all, some, depth) {
  return some.flatMap((lane) => {
    const children = all.filter((each) => each.inside === lane.key);
    return [{ ...lane, depth, holds: children.length > 0 }, ...behindParents(all, children, depth + 1)];
  });
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
