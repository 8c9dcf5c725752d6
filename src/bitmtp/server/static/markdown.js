/** Markdown of a model, shown: its HTML stays text, its pictures stay away, its code can be copied. */

import MarkdownIt from "./vendor/markdown-it.js";

const markdown = new MarkdownIt({ html: false }).disable("image");

/** Fill `parent` with what `text` says. */
export function show(parent, text) {
  parent.innerHTML = markdown.render(text);
  for (const link of parent.querySelectorAll("a")) Object.assign(link, { target: "_blank", rel: "noopener noreferrer" });
  for (const code of parent.querySelectorAll("pre")) {
    const words = code.textContent;
    const button = document.createElement("button");
    Object.assign(button, { type: "button", className: "copy", textContent: "Copy" });
    copies(button, () => words);
    code.tabIndex = 0; // long lines scroll, by keyboard too
    code.before(button);
  }
}

/** Let a button copy text, where the browser allows it. */
export function copies(button, text) {
  button.hidden = !navigator.clipboard;
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text());
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
}
