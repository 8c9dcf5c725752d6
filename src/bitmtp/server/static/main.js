/** The playground: reads the form, runs the prompt under one policy or two, and reports how it went. */

import { model, write } from "./api.js";
import { Turns } from "./turns.js";
import { Pane, alignCharts } from "./view.js";

// Which settings a policy has; the server refuses the others. Lossy: the text may differ from the autoregressive one.
const POLICIES = {
  auto: { settings: ["block_size"], lossy: false },
  speculative: { settings: ["block_size"], lossy: false },
  autoregressive: { settings: [], lossy: false },
  confidence: { settings: ["block_size", "tau"], lossy: true },
  hybrid: { settings: ["block_size", "tau", "min_prefix"], lossy: true },
};

const element = Object.fromEntries([...document.querySelectorAll("[id]")].map((found) => [found.id, found]));
const { form, key, compare, policy, other, run, stop, next, settings, formatted, headline } = element;
const turns = new Turns(element.before, element.turns);
let running = null; // the AbortController of the run in progress
let panes = []; // of the last run

const value = (id) => (element[id].value === "" ? null : element[id].valueAsNumber);
const chosen = () => (compare.checked ? [policy.value, other.value] : [policy.value]);

function report(text, kind = "") {
  element.status.textContent = text;
  element.status.className = kind;
}

function fail(error) {
  if (error.status === 401) {
    element["key-field"].hidden = false;
    key.focus();
  }
  report(error.message, "error");
}

const chatting = () => element.form_of_prompt.value === "chat";

function arrange() {
  element.system.disabled = !chatting();
  next.disabled = running !== null || !chatting() || !panes[0]?.trace.text;
  other.disabled = !compare.checked;
  for (const id of POLICIES.hybrid.settings) {
    element[id].disabled = !chosen().some((name) => POLICIES[name].settings.includes(id));
  }
}

/** The prompt as the API has it: a text, or the turns so far and a new one. */
function asked(prompt) {
  if (!chatting()) return { prompt };
  const system = element.system.value.trim() ? [{ role: "system", content: element.system.value }] : [];
  return { messages: [...system, ...turns.messages, { role: "user", content: prompt }] };
}

function request(name, seed) {
  const options = POLICIES[name].settings.map((id) => [id, value(id)]);
  return {
    ...asked(element.prompt.value),
    max_tokens: value("max_tokens"),
    temperature: value("temperature"),
    top_p: value("top_p"),
    seed,
    decoding: { policy: name, ...Object.fromEntries(options), trace: true },
  };
}

async function show(pane, wanted, signal) {
  for await (const event of write(wanted, key.value, signal)) {
    if (event.decoding) pane.describe(event.decoding, wanted.temperature > 0 ? wanted.seed : null);
    if (event.usage) pane.finish(event.usage);
    const [choice] = event.choices;
    if (choice?.tokens?.length) {
      pane.add(choice);
      alignCharts(panes);
      lead("so far");
    }
  }
}

/** Speed leads: how many times as fast as the other side the first one is. */
function lead(words, kind = "") {
  const [first, second] = panes;
  const ratio = second && first.trace.speed / second.trace.speed;
  headline.textContent = Number.isFinite(ratio) ? `${ratio.toFixed(2)} × ${second.name}, ${words}` : "";
  headline.className = kind;
}

function conclude() {
  const [first, second] = panes;
  const written = first.trace.ids.length;
  report(`Done: ${written} ${written === 1 ? "token" : "tokens"}`);
  for (const pane of panes) pane.steps.begin();
  if (!second) return;
  const index = first.trace.difference(second.trace);
  if (index < 0) return lead("same text");
  for (const pane of panes) pane.mark(index);
  lead(`another text from token ${index + 1} on`, "warning");
}

async function start() {
  running?.abort();
  const own = new AbortController();
  running = own;
  // Drawn here, and not by the server, so that both runs of a comparison have it and no digit of it is lost.
  const seed = value("seed") ?? crypto.getRandomValues(new Uint32Array(1))[0];
  const requests = chosen().map((name) => request(name, seed));
  element.panes.replaceChildren();
  headline.textContent = "";
  panes = requests.map((asked) => new Pane(element.panes, asked.decoding.policy));
  alignCharts(panes);
  stop.disabled = false;
  arrange();
  element.result.scrollIntoView({ block: "nearest" });
  try {
    // One after the other: texts that share passes draft less, and their figures would say little.
    for (const [index, wanted] of requests.entries()) {
      report(`Writing: ${wanted.decoding.policy} …`);
      await show(panes[index], wanted, own.signal);
    }
    conclude();
  } catch (error) {
    if (own !== running) return; // another run has begun
    if (own.signal.aborted) report("Stopped");
    else fail(error);
    for (const pane of panes) pane.steps.begin();
  }
  if (document.activeElement === stop) run.focus();
  stop.disabled = true;
  running = null;
  arrange();
}

/** The answer stays, and a new message can be written. */
function goOn() {
  turns.add(element.prompt.value, panes[0].trace.text);
  element.prompt.value = "";
  clear();
}

function startOver() {
  turns.clear();
  clear();
}

function clear() {
  panes = [];
  element.panes.replaceChildren();
  headline.textContent = "";
  report("");
  arrange();
  element.prompt.focus();
}

/** Arrow keys step through the iterations of the pane that has the focus, else of the first. */
function step(by) {
  const pane = panes.find((one) => one.holds(document.activeElement)) ?? panes[0];
  pane?.steps.move(by);
}

async function introduce() {
  try {
    const { id, max_model_len, block_size } = await model(key.value);
    element.model.textContent = `${id} · context ${max_model_len} · blocks of up to ${block_size}`;
    for (const setting of ["block_size", "min_prefix"]) element[setting].max = block_size;
    if (!running) report("");
  } catch (error) {
    fail(error);
  }
}

for (const select of [policy, other]) {
  for (const [name, { lossy }] of Object.entries(POLICIES)) {
    select.add(new Option(lossy ? `${name} (lossy)` : name, name));
  }
}
other.value = "autoregressive";
settings.open = matchMedia("(min-width: 60rem)").matches;
arrange();
introduce();

form.addEventListener("submit", (event) => {
  event.preventDefault();
  start();
});
form.addEventListener("change", arrange);
form.addEventListener("invalid", () => (settings.open = true), true); // what is hidden cannot be pointed at
key.addEventListener("change", introduce);
stop.addEventListener("click", () => running?.abort());
next.addEventListener("click", goOn);
element.forget.addEventListener("click", startOver);
formatted.addEventListener("change", () => {
  element.panes.classList.toggle("as-markdown", formatted.checked);
  for (const pane of panes) pane.format();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
  const typing = event.target.closest?.("input, textarea, select, summary");
  if (!typing && event.key === "ArrowLeft") step(-1);
  if (!typing && event.key === "ArrowRight") step(1);
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    form.requestSubmit();
  }
});
