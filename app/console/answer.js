// Where the text of an answer appears, for eyes and for those who listen.

import { byId } from "./element.js";

const SENTENCE = /[.!?:]\s|\n/g;

/** The elements `answer-text` and `answer-said` of the page. */
export class Answer {
  #text = byId("answer-text");
  #said = byId("answer-said");
  #unsaid = "";

  clear() {
    this.#text.replaceChildren();
    this.#said.replaceChildren();
    this.#unsaid = "";
  }

  get empty() {
    return !this.#text.hasChildNodes();
  }

  write(text) {
    if (!text) return;
    const box = this.#text;
    const atEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 8;
    box.append(text);
    if (atEnd) box.scrollTop = box.scrollHeight;
    this.#unsaid += text;
    // A screen reader hears sentences, not tokens.
    const last = [...this.#unsaid.matchAll(SENTENCE)].at(-1);
    if (last) this.#sayUntil(last.index + last[0].length);
  }

  end() {
    this.#text.normalize();
    this.#sayUntil(this.#unsaid.length);
  }

  #sayUntil(length) {
    this.#said.textContent = this.#unsaid.slice(0, length);
    this.#unsaid = this.#unsaid.slice(length);
  }
}
