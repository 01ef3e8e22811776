// The pools: what queues before each role, and the workers of it.

import { now } from "./api.js";
import { byId, h, keep, say, show } from "./element.js";
import { count, duration } from "./units.js";

const STATES = ["held", "cached", "quarantined", "free"];
const TITLES = { prefill: "Prefill", decode: "Decode", unified: "Unified" };

export function showPools(pools) {
  say(byId("model"), pools.model);
  keep(byId("pools"), columns(pools), (column) => column.role, createColumn, updateColumn);
}

/** A column for each role that is there, and for one that is missed. A unified worker is both others. */
function columns({ workers, queues }) {
  const of = (role) => workers.filter((worker) => worker.role === role);
  const unified = of("unified");
  return ["prefill", "decode", "unified"]
    .map((role) => ({ role, workers: of(role), queue: queues[role] ?? null }))
    .filter(({ role, workers: found, queue }) => found.length || queue?.legs || (role !== "unified" && !unified.length));
}

function createColumn({ role }) {
  const queue = h("span", { class: "queue" });
  const workers = h("ul", { class: "workers" });
  const empty = h(
    "p",
    { class: "empty" },
    `No ${role} worker lives. Start one: `,
    h("code", {}, `kvrelay worker --role ${role}`),
  );
  const column = h("div", { class: "column", "data-role": role }, h("div", { class: "head" }, h("h3", {}, TITLES[role]), queue), workers, empty);
  column.parts = { queue, workers, empty };
  return column;
}

function updateColumn(column, { role, workers, queue }) {
  const { parts } = column;
  say(parts.queue, queue ? queueText(queue) : "");
  parts.queue.classList.toggle("waits", Boolean(queue?.legs));
  keep(parts.workers, workers, (worker) => worker.id, createWorker, updateWorker);
  show(parts.workers, workers.length > 0);
  show(parts.empty, workers.length === 0);
}

function queueText({ legs, since }) {
  if (!legs) return "nothing queued";
  const age = since === null ? "" : ` · next waits ${duration(Math.max(0, now() - since * 1000))}`;
  return `${count(legs)} queued${age}`;
}

function createWorker() {
  const name = h("span", { class: "name" });
  const host = h("span", { class: "host" });
  const legs = h("span", { class: "legs" });
  const segments = Object.fromEntries(STATES.map((state) => [state, h("i", { class: state })]));
  const bar = h("div", { class: "pages", role: "img" }, ...Object.values(segments));
  const used = h("span");
  const size = h("span", { class: "size", title: "pages × tokens of a page" });
  const worker = h(
    "li",
    { class: "card worker" },
    h("div", { class: "head" }, h("span", { class: "who" }, name, host), legs),
    bar,
    h("div", { class: "foot" }, used, size),
  );
  worker.parts = { name, host, legs, segments, bar, used, size };
  return worker;
}

function updateWorker(element, worker) {
  const { name, host, legs, segments, bar, used, size } = element.parts;
  const total = STATES.reduce((sum, state) => sum + worker.pages[state], 0);
  say(name, worker.name);
  say(host, worker.host);
  say(legs, legsText(worker));
  element.classList.toggle("busy", worker.running > 0);
  for (const state of STATES) {
    const pages = worker.pages[state];
    segments[state].style.flexGrow = pages;
    // A page of thousands still shows.
    segments[state].classList.toggle("any", pages > 0 && state !== "free");
  }
  const shown = STATES.filter((state) => worker.pages[state] > 0 || state === "held");
  const text = shown.map((state) => `${count(worker.pages[state])} ${state}`).join(" · ");
  bar.setAttribute("aria-label", `Of ${count(total)} pages: ${text}`);
  say(used, text);
  say(size, `${count(total)} × ${worker.page_size} tokens`);
}

function legsText({ running, waiting, slots }) {
  const waits = waiting ? `${count(waiting)} waiting · ` : "";
  return `${count(running)} running · ${waits}${count(slots)} ${slots === 1 ? "slot" : "slots"} free`;
}
