/** The turns of a conversation that came before the one being written. */

import { show } from "./markdown.js";

export class Turns {
  messages = [];
  #root;
  #list;

  /** @param {Element} root is hidden while there are none; `list` takes them */
  constructor(root, list) {
    this.#root = root;
    this.#list = list;
  }

  /** Append a message and its answer. */
  add(asked, answered) {
    this.messages.push({ role: "user", content: asked }, { role: "assistant", content: answered });
    const [question, answer] = [document.createElement("p"), document.createElement("div")];
    question.textContent = asked;
    question.className = "asked";
    answer.className = "formatted";
    show(answer, answered);
    const item = document.createElement("li");
    item.append(question, answer);
    this.#list.append(item);
    this.#root.hidden = false;
  }

  /** Forget all. */
  clear() {
    this.messages = [];
    this.#list.replaceChildren();
    this.#root.hidden = true;
  }
}
