// The page /console.

import { Watched } from "./api.js";
import { Compose } from "./compose.js";
import { byId, show } from "./element.js";
import { Frame } from "./frame.js";
import { Poll } from "./poll.js";
import { showPools } from "./pools.js";
import { showRequests } from "./requests.js";

const LENGTHS = [20, 60, 200]; // of the list; older ones are opened by id

const poolsAnswer = new Watched();
const listAnswer = new Watched();
let length = 0;

async function refresh(signal) {
  const [pools, list] = await Promise.all([
    poolsAnswer.get("/v1/pools", signal),
    listAnswer.get(`/v1/requests?limit=${LENGTHS[length]}`, signal),
  ]);
  // Also what did not change: ages do.
  showPools(pools);
  showRequests(list.data);
  show(byId("older"), list.before !== null && length < LENGTHS.length - 1);
}

function beginAgain() {
  poolsAnswer.forget();
  listAnswer.forget();
  poll.now();
}

const frame = new Frame(beginAgain);
const poll = new Poll(refresh, (problem) => frame.heard(problem));
byId("older").addEventListener("click", () => {
  length += 1;
  beginAgain();
});
byId("find").addEventListener("submit", (event) => {
  event.preventDefault();
  const id = byId("find-id").value.trim();
  if (id) location.assign(`/console/requests/${encodeURIComponent(id)}`);
});
new Compose(frame);
poll.now();
