// The list of requests, newest first.

import { now } from "./api.js";
import { byId, h, keep, say, show } from "./element.js";
import { badge, timesOf } from "./state.js";
import { ago, count, duration } from "./units.js";

export function showRequests(requests) {
  keep(byId("requests"), requests, (request) => request.id, createRow, updateRow);
  show(byId("no-requests"), requests.length === 0);
  say(byId("no-requests"), "No request yet. Send one from this page or by the API, and it shows up here.");
}

function createRow({ id }) {
  const link = h("a", { href: `/console/requests/${encodeURIComponent(id)}`, class: "mono", title: id }, id);
  const state = h("td");
  const tokens = h("td", { class: "number" });
  const bars = Object.fromEntries(["wait", "move", "compute"].map((kind) => [kind, h("i", { class: kind })]));
  const spark = h("div", { class: "spark", role: "img" }, ...Object.values(bars));
  const first = h("td", { class: "number wide" });
  const total = h("td", { class: "number" });
  const came = h("td", { class: "number wide soft" });
  const row = h("tr", {}, h("th", { scope: "row" }, link), state, tokens, h("td", { class: "wide" }, spark), first, total, came);
  row.parts = { state, tokens, bars, spark, first, total, came };
  return row;
}

function updateRow(row, request) {
  const { state, tokens, bars, spark, first, total, came } = row.parts;
  const times = timesOf(request, now());
  const shown = badge(request);
  if (!state.firstChild?.isEqualNode(shown)) state.replaceChildren(shown);
  say(tokens, `${count(request.usage.prompt_tokens)} → ${count(request.usage.completion_tokens)}`);
  say(first, duration(times.firstToken));
  say(total, duration(times.total));
  say(came, ago((now() - request.created * 1000) / 1000));
  for (const [kind, ms] of [["wait", times.queued], ["move", times.relay], ["compute", times.decode]]) {
    bars[kind].style.flexGrow = ms;
  }
  spark.setAttribute(
    "aria-label",
    `queued ${duration(times.queued)}, relay ${duration(times.relay)}, decode ${duration(times.decode)}`,
  );
}
