// What both pages have around their content: is this live, what is wrong, with which key.

import { key } from "./api.js";
import { byId, h, say, show } from "./element.js";
import { KeyDialog } from "./key_dialog.js";

const WHAT_TO_DO = {
  gateway_away: "It may be restarting. If it stays away, look into the gateway's log.",
  redis_away: "Look after the server at REDIS_URL: when it is back, requests go on where they were.",
};

export class Frame {
  #dialog;
  #heardAt = null;
  #watched = false; // whether the notice is about what the page watches

  /** `onKey` is called when the page should ask again, with another key. */
  constructor(onKey) {
    this.#dialog = new KeyDialog(() => {
      this.#showKey();
      onKey();
    });
    byId("key").addEventListener("click", () => this.#dialog.open());
    document.addEventListener("visibilitychange", () => document.hidden && this.#pulse("paused", "paused"));
    this.#showKey();
  }

  /** What the last question brought: null, or a Problem. */
  heard(problem) {
    if (problem === null) {
      this.#heardAt = new Date();
      this.#pulse("live", "live");
      if (this.#watched) show(byId("notice"), false);
    } else if (problem.kind === "key") {
      this.#needKey();
    } else {
      this.#away(problem);
    }
    document.body.classList.toggle("stale", problem !== null);
  }

  /** A Problem of something that was done once, not of what the page watches. */
  refused(problem) {
    if (problem.kind === "key") return this.#needKey();
    this.#notice(problem.message, { label: "Dismiss", act: () => show(byId("notice"), false) });
    this.#watched = false;
  }

  /** There is nothing to watch. */
  gone(problem) {
    this.#pulse("off", "not found");
    this.#notice(problem.message);
  }

  #needKey() {
    const why = key.get()
      ? "The gateway does not know this key. It may have been revoked: ask for another one."
      : "This gateway asks for a key: one of API_KEY or API_KEYS_FILE, or an admin key to see all requests.";
    this.#pulse("off", "no key");
    this.#notice(key.get() ? "The gateway does not know this key." : "This gateway asks for an API key.", {
      label: "Give a key",
      act: () => this.#dialog.open(why),
    });
    this.#dialog.open(why);
  }

  #away(problem) {
    this.#pulse("off", "away");
    const what = problem.code === "redis_away" ? "Redis cannot be reached." : problem.message;
    const old = this.#heardAt ? ` What you see is as of ${this.#heardAt.toLocaleTimeString()}.` : "";
    this.#notice(`${what} ${WHAT_TO_DO[problem.code] ?? ""}${old} Trying again …`);
  }

  #notice(text, action) {
    this.#watched = true;
    const notice = byId("notice");
    if (notice.hidden || notice.textContent !== text + (action?.label ?? "")) {
      const more = action ? [h("button", { type: "button", onclick: action.act }, action.label)] : [];
      notice.replaceChildren(h("span", {}, text), ...more);
    }
    show(notice, true);
  }

  #pulse(state, text) {
    const pulse = byId("pulse");
    pulse.dataset.state = state;
    say(pulse, text);
  }

  #showKey() {
    say(byId("key"), key.get() ? "API key set" : "API key");
  }
}
