// Where a person gives the page an API key.

import { key } from "./api.js";
import { h } from "./element.js";

/** `onKey` is called when there is another key, or none any more. */
export class KeyDialog {
  #dialog;
  #why;
  #secret;
  #onKey;

  constructor(onKey) {
    this.#onKey = onKey;
    this.#why = h("p", { id: "key-why" });
    this.#secret = h("input", {
      id: "key-secret",
      type: "password",
      autocomplete: "off",
      spellcheck: "false",
      "aria-describedby": "key-why",
    });
    const form = h(
      "form",
      { onsubmit: (event) => this.#take(event, this.#secret.value.trim()) },
      h("h2", { id: "key-title" }, "API key"),
      this.#why,
      h("label", { for: "key-secret" }, "Key"),
      this.#secret,
      h(
        "div",
        { class: "actions" },
        h("button", { class: "primary", type: "submit" }, "Use this key"),
        h("button", { type: "button", onclick: (event) => this.#take(event, "") }, "Forget it"),
        h("button", { class: "quiet", type: "button", onclick: () => this.#dialog.close() }, "Close"),
      ),
      h("p", { class: "hint" }, "It stays in this tab until the tab is closed, and is sent to this gateway only."),
    );
    this.#dialog = h("dialog", { "aria-labelledby": "key-title" }, form);
    document.body.append(this.#dialog);
  }

  open(why = "Give the key with which this page shall call the API. You see what that key may see.") {
    this.#why.textContent = why;
    this.#secret.value = key.get();
    if (!this.#dialog.open) this.#dialog.showModal();
    this.#secret.select();
  }

  #take(event, secret) {
    event.preventDefault();
    key.set(secret);
    this.#dialog.close();
    this.#onKey();
  }
}
