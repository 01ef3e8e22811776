// A request's relay, drawn: a lane for each thing that was done, by whom, and when.

import { h, keep, say } from "./element.js";
import { endOf, lanesOf, stepOf, titleOf } from "./spans.js";
import { bytes, count, duration, round } from "./units.js";

const TICKS = 5;
const MOST_ROWS = 100; // of the single spans of one lane

/** Draw `timeline` into `root`, until `nowMs` after its arrival. What a reader has opened stays open. */
export function drawWaterfall(root, timeline, nowMs, whole) {
  const lanes = lanesOf(timeline.spans, nowMs);
  const end = endOf(lanes, whole);
  const step = stepOf(end, TICKS);
  root.style.setProperty("--tick", `${(100 * step) / end}%`);
  const attempts = [...new Set(lanes.map((lane) => lane.attempt))];
  const groups = attempts.map((attempt) => ({
    attempt,
    named: attempts.length > 1,
    lanes: lanes.filter((lane) => lane.attempt === attempt),
  }));
  keep(root, [{ attempt: "axis", step, end }, ...groups], (group) => group.attempt, createGroup, (element, group) => {
    if (group.step) updateAxis(element, group);
    else updateGroup(element, group, end);
  });
}

function createGroup(group) {
  if (group.step) return h("div", { class: "axis", "aria-hidden": "true" }, h("div", { class: "track" }));
  const title = h("h3");
  const list = h("div", { class: "lanes" });
  const element = h("div", { class: "attempt" }, title, list);
  element.parts = { title, list };
  return element;
}

function updateAxis(axis, { step, end }) {
  const ticks = [];
  for (let at = 0; at < end * 0.96; at += step) ticks.push(at);
  keep(axis.firstChild, ticks, (at) => at, () => h("span"), (tick, at) => {
    tick.style.left = `${(100 * at) / end}%`;
    say(tick, at === 0 ? "0" : round(at));
  });
}

function updateGroup(element, { attempt, named, lanes }, end) {
  element.parts.title.hidden = !named;
  say(element.parts.title, `Attempt ${attempt}`);
  keep(element.parts.list, lanes, (lane) => lane.key, createLane, (lane, data) => updateLane(lane, data, end));
}

function createLane({ name, process, depth, kind }) {
  const track = h("span", { class: "track", "aria-hidden": "true" });
  const time = h("span", { class: "time" });
  const times = h("span", { class: "times" });
  const title = h("span", { class: "what" }, titleOf(name), times);
  title.style.setProperty("--depth", depth);
  const summary = h("summary", {}, title, h("span", { class: "process", title: process }, process.split(/[.@]/)[0]), track, time);
  const rows = h("tbody");
  const more = h("p", { class: "hint" });
  const head = ["From", "Took", "What"].map((text) => h("th", { scope: "col" }, text));
  const detail = h("div", { class: "detail" }, h("table", {}, h("thead", {}, h("tr", {}, ...head)), rows), more);
  const lane = h("details", { class: "lane", "data-kind": kind, "data-name": name }, summary, detail);
  lane.parts = { track, time, times, rows, more };
  return lane;
}

function updateLane(lane, { spans, busy_ms: busy, holds }, end) {
  const { track, time, times, rows, more } = lane.parts;
  lane.classList.toggle("holds", holds);
  say(time, duration(busy));
  say(times, spans.length > 1 ? `× ${count(spans.length)}` : "");
  const shown = spans.filter((span) => span.start_ms < end);
  keep(track, shown, (span) => spans.indexOf(span), () => h("i"), (bar, span) => {
    bar.style.left = `${(100 * span.start_ms) / end}%`;
    bar.style.width = `${(100 * (Math.min(span.end_ms, end) - span.start_ms)) / end}%`;
    bar.classList.toggle("open", span.open);
    bar.classList.toggle("cut", span.end_ms > end);
    bar.title = `${titleOf(span.name)}: ${duration(span.end_ms - span.start_ms)}${span.open ? " so far" : ""}, ${said(span)}`;
  });
  keep(rows, spans.slice(0, MOST_ROWS), (span) => spans.indexOf(span), createRow, (row, span) => {
    const [from, took, what] = row.children;
    say(from, duration(span.start_ms));
    say(took, duration(span.end_ms - span.start_ms) + (span.open ? " so far" : ""));
    say(what, said(span));
  });
  say(more, spans.length > MOST_ROWS ? `and ${count(spans.length - MOST_ROWS)} more` : "");
}

function createRow() {
  return h("tr", {}, h("td", { class: "number" }), h("td", { class: "number" }), h("td"));
}

/** The attributes in words, and how fast bytes went. */
function said({ attributes, start_ms: start, end_ms: end }) {
  const parts = Object.entries(attributes ?? {}).map(([name, value]) => {
    if (name === "bytes") return bytes(value);
    const words = name.replaceAll("_", " ");
    return typeof value === "number" ? `${count(value)} ${words}` : `${words} ${value}`;
  });
  const ms = end - start;
  if (attributes?.bytes && ms > 0) parts.push(`${bytes((1000 * attributes.bytes) / ms)}/s`);
  return parts.join(" · ");
}
