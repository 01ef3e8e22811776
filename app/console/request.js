// The page /console/requests/<id>.

import { WATCHING, ask, now } from "./api.js";
import { Answer } from "./answer.js";
import { byId, h, keep, say, show } from "./element.js";
import { Frame } from "./frame.js";
import { Poll } from "./poll.js";
import { badge, hasEnded, timesOf } from "./state.js";
import { follow } from "./stream.js";
import { bytes, count, duration } from "./units.js";
import { drawWaterfall } from "./waterfall.js";

const SETTLE_MS = 5_000; // after its end the last spans come

const id = decodeURIComponent(location.pathname.split("/").pop());
const path = `/v1/requests/${encodeURIComponent(id)}`;
const answer = new Answer();
let request = null;
let timeline = null;
let following = null;
let drawnFrom = 0; // the moment of performance.now() at which the timeline was so

async function refresh(signal) {
  const read = async (what) => (await ask("GET", what, { headers: WATCHING, signal })).json();
  const [found, spans] = await Promise.all([
    read(`${path}?after=${request?.position ?? 0}`), // its text streams
    read(`${path}/timeline`),
  ]);
  request = found;
  timeline = spans;
  drawnFrom = performance.now();
  render();
  const endedMs = now() - request.created * 1000 - (request.ledger.total ?? 0);
  return !hasEnded(request) || endedMs < SETTLE_MS;
}

function render() {
  say(byId("model"), request.model);
  const state = badge(request);
  if (!byId("state").firstChild?.isEqualNode(state)) byId("state").replaceChildren(state);
  show(byId("cancel"), !hasEnded(request));
  show(byId("failure"), request.error !== null);
  if (request.error) say(byId("failure"), request.error.message);
  keep(byId("facts"), facts(), ([name]) => name, createFact, (fact, [, value]) => say(fact.lastChild, value));
  say(byId("no-text"), hasEnded(request) ? "It wrote no text." : "Nothing was written yet.");
  show(byId("no-text"), answer.empty);
  draw();
}

function draw() {
  if (!timeline) return;
  const whole = document.querySelector("input[name=zoom]:checked").value === "whole";
  show(byId("zoom"), timeline.spans.some((span) => span.name === "decode"));
  show(byId("no-timeline"), timeline.spans.length === 0);
  say(byId("no-timeline"), "Its workers told nothing of this request.");
  drawWaterfall(byId("waterfall"), timeline, timeline.now_ms + performance.now() - drawnFrom, whole);
}

function facts() {
  const { usage, ledger } = request;
  const times = timesOf(request, now());
  const cached = usage.prompt_tokens_details?.cached_tokens;
  const between = usage.completion_tokens > 1 && times.firstToken !== null ? times.decode / (usage.completion_tokens - 1) : null;
  return [
    ["Came", cameAt(new Date(request.created * 1000))],
    ["First token", duration(times.firstToken)],
    ["Between tokens", duration(between)],
    ["Total", duration(times.total)],
    ["Prompt", `${count(usage.prompt_tokens)} tokens${cached ? `, ${count(cached)} cached` : ""}`],
    ["Output", `${count(usage.completion_tokens)} tokens${request.finish_reason ? `, ${request.finish_reason}` : ""}`],
    ["KV sent", ledger.transfer ? sent(ledger.transfer) : "–"],
    ["Attempts", `${count(ledger.attempts)}${ledger.retractions ? `, ${count(ledger.retractions)} retracted` : ""}`],
  ];
}

function sent(transfer) {
  const spared = transfer.spared_bytes ? `, ${bytes(transfer.spared_bytes)} were there` : "";
  return `${bytes(transfer.bytes)}, ${duration(transfer.exposed_ms)} exposed${spared}`;
}

function cameAt(date) {
  const today = date.toDateString() === new Date().toDateString();
  return today ? date.toLocaleTimeString() : date.toLocaleString();
}

function createFact([name]) {
  return h("div", {}, h("dt", {}, name), h("dd"));
}

/** All of the text, from its beginning. */
async function stream() {
  following?.abort();
  const { signal } = (following = new AbortController());
  answer.clear();
  try {
    for await (const { data } of follow(id, signal)) {
      answer.write(data.text);
      show(byId("no-text"), answer.empty);
    }
    answer.end();
    poll.now();
  } catch (problem) {
    if (!signal.aborted && problem.code !== "request_not_found") frame.refused(problem);
  }
}

async function cancel() {
  byId("cancel").disabled = true;
  try {
    await ask("DELETE", path);
    poll.now();
  } catch (problem) {
    frame.refused(problem);
  } finally {
    byId("cancel").disabled = false;
  }
}

function heard(problem) {
  if (problem?.code === "request_not_found") {
    poll.stop();
    frame.gone(problem);
  } else {
    frame.heard(problem);
  }
}

function begin() {
  poll.now();
  stream();
}

say(byId("title"), id);
document.title = `${id} – kvrelay console`;
const frame = new Frame(begin);
const poll = new Poll(refresh, heard);
byId("cancel").addEventListener("click", cancel);
byId("zoom").addEventListener("change", draw);
begin();
