// The API of the gateway, as any client calls it.

const KEY = "kvrelay.key";

/** What went wrong. `kind`: `key` (one is needed, or another one), `away` (try again), `refused`. */
export class Problem extends Error {
  constructor(kind, message, { status = 0, code = "", param = null } = {}) {
    super(message);
    Object.assign(this, { kind, status, code, param });
  }
}

/** The key of this tab; it goes with the tab. */
export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (secret) => (secret ? sessionStorage.setItem(KEY, secret) : sessionStorage.removeItem(KEY)),
};

const SAME_CLOCK_MS = 1_500;
let skewMs = -Infinity;

/** The server's time in ms. Its `Date` is cut to seconds, so the latest one seen is nearest to it. */
export function now() {
  return Date.now() + (Number.isFinite(skewMs) && Math.abs(skewMs) > SAME_CLOCK_MS ? skewMs : 0);
}

function noteTime(response) {
  const date = Date.parse(response.headers.get("Date") ?? "");
  if (!Number.isNaN(date)) skewMs = Math.max(skewMs, date - Date.now());
}

/** The response, if it is one of success or 304. Throws Problem; an abort is thrown as it comes. */
export async function ask(method, path, { body, headers = {}, signal } = {}) {
  const sent = { ...headers };
  if (key.get()) sent.Authorization = `Bearer ${key.get()}`;
  if (body !== undefined) sent["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method,
      headers: sent,
      signal,
      cache: "no-store",
      credentials: "omit",
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("away", "The gateway does not answer.", { code: "gateway_away" });
  }
  noteTime(response);
  if (response.ok || response.status === 304) return response;
  throw await problemOf(response);
}

async function problemOf(response) {
  const { status } = response;
  let error;
  try {
    ({ error } = await response.json());
  } catch {
    error = null; // a proxy's page, or an answer that broke off
  }
  const message = error?.message ?? `The gateway answered ${status}.`;
  const kind = status === 401 ? "key" : status === 429 || status >= 500 ? "away" : "refused";
  return new Problem(kind, message, { status, code: error?.code ?? "", param: error?.param ?? null });
}

/** Of a question that is asked all the time: the answer may be a second old. */
export const WATCHING = { "Cache-Control": "max-age=1" };

/** JSON that is asked for again and again, and sent again only when it has changed. */
export class Watched {
  #etag = null;
  #found = null; // kept here: who asked drops it where another of its questions fails

  async get(path, signal) {
    const headers = { ...WATCHING };
    if (this.#etag) headers["If-None-Match"] = this.#etag;
    const response = await ask("GET", path, { headers, signal });
    if (response.status === 304) {
      await response.text(); // else the browser counts it as cancelled
    } else {
      this.#found = await response.json();
      this.#etag = response.headers.get("ETag");
    }
    return this.#found;
  }

  forget() {
    this.#etag = this.#found = null;
  }
}
