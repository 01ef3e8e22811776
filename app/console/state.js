// A request's state, and what follows from its record.

import { h } from "./element.js";

const ENDED = new Set(["finished", "failed", "cancelled"]);

export function hasEnded({ status }) {
  return ENDED.has(status);
}

export function badge({ status, attempts, ledger }) {
  const tries = attempts ?? ledger?.attempts ?? 1;
  const again = tries > 1 ? [h("span", { class: "again" }, `attempt ${tries}`)] : [];
  return h("span", { class: "badge", "data-state": status }, status, ...again);
}

/** In ms: `queued`, `relay` (claim to first token) and `decode` add up to `total`, and grow until `nowMs` while the
 * request is open. `firstToken` is null before there is one. */
export function timesOf(request, nowMs) {
  const { ledger, created } = request;
  const total = ledger.total ?? Math.max(0, nowMs - created * 1000);
  const firstToken = ledger.first_token === null ? null : Math.min(total, ledger.first_token);
  const first = firstToken ?? total;
  const queued = Math.min(first, ledger.queued ?? total);
  return { queued, relay: first - queued, decode: total - first, firstToken, total };
}
