// Something that is asked once a second, while somebody looks.

const EVERY_MS = 1_000;
const SELDOM_MS = 8_000;

/** Calls `ask(signal)` until it answers false or is stopped. `onProblem` hears what it throws, null after a
 * success; failures are tried again, less and less often. A hidden page asks nothing. */
export class Poll {
  #ask;
  #onProblem;
  #timer = null;
  #asking = null;
  #failures = 0;
  #stopped = false;

  constructor(ask, onProblem) {
    this.#ask = ask;
    this.#onProblem = onProblem;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.#pause() : this.now()));
  }

  /** Ask at once, also when it was stopped. */
  now() {
    this.#pause();
    this.#stopped = false;
    if (!document.hidden) this.#turn();
  }

  stop() {
    this.#pause();
    this.#stopped = true;
  }

  #pause() {
    clearTimeout(this.#timer);
    this.#asking?.abort();
    this.#asking = null;
  }

  async #turn() {
    const asking = (this.#asking = new AbortController());
    let goesOn = true;
    try {
      goesOn = (await this.#ask(asking.signal)) !== false;
      this.#failures = 0;
      if (!asking.signal.aborted) this.#onProblem(null);
    } catch (problem) {
      if (asking.signal.aborted) return;
      this.#failures += 1;
      this.#onProblem(problem);
      goesOn = problem.kind !== "key";
    }
    if (asking.signal.aborted || this.#stopped || !goesOn) return;
    this.#timer = setTimeout(() => this.#turn(), Math.min(SELDOM_MS, EVERY_MS * 2 ** Math.min(this.#failures, 3)));
  }
}
