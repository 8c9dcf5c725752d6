/** The playground: reads the form, runs the prompt under one policy or two, and reports how it went. */

import { model, write } from "./api.js";
import { Pane, alignCharts } from "./view.js";

// Which settings a policy has; the server refuses the others. Lossy: the text may differ from the autoregressive one.
const POLICIES = {
  speculative: { settings: ["block_size"], lossy: false },
  auto: { settings: ["block_size"], lossy: false },
  autoregressive: { settings: [], lossy: false },
  confidence: { settings: ["block_size", "tau"], lossy: true },
  hybrid: { settings: ["block_size", "tau", "min_prefix"], lossy: true },
};

const element = Object.fromEntries([...document.querySelectorAll("[id]")].map((found) => [found.id, found]));
const { form, key, compare, policy, other, run, stop, settings } = element;
let running = null; // the AbortController of the run in progress

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

function arrange() {
  other.disabled = !compare.checked;
  for (const id of POLICIES.hybrid.settings) {
    element[id].disabled = !chosen().some((name) => POLICIES[name].settings.includes(id));
  }
}

function request(name, seed) {
  const options = POLICIES[name].settings.map((id) => [id, value(id)]);
  return {
    form: element.form_of_prompt.value,
    prompt: element.prompt.value,
    max_tokens: value("max_tokens"),
    temperature: value("temperature"),
    top_p: value("top_p"),
    seed,
    decoding: { policy: name, ...Object.fromEntries(options), trace: true },
  };
}

async function show(pane, panes, asked, signal) {
  for await (const event of write(asked, key.value, signal)) {
    if (event.decoding) pane.describe(event.decoding, asked.temperature > 0 ? asked.seed : null);
    if (event.usage) pane.finish(event.usage);
    const tokens = event.choices[0]?.tokens;
    if (tokens?.length) {
      pane.add(tokens);
      alignCharts(panes);
    }
  }
}

function conclude(panes) {
  const [first, second] = panes;
  const written = first.trace.ids.length;
  if (!second) return report(`Done: ${written} ${written === 1 ? "token" : "tokens"}`);
  const index = first.trace.difference(second.trace);
  if (index < 0) return report("✓ Identical text", "good");
  for (const pane of panes) pane.mark(index);
  return report(`≠ Differs at token ${index + 1}`, "warning");
}

async function start() {
  running?.abort();
  const own = new AbortController();
  running = own;
  // Drawn here, and not by the server, so that both runs of a comparison have it and no digit of it is lost.
  const seed = value("seed") ?? crypto.getRandomValues(new Uint32Array(1))[0];
  const requests = chosen().map((name) => request(name, seed));
  element.panes.replaceChildren();
  const panes = requests.map((asked) => new Pane(element.panes, asked.decoding.policy));
  alignCharts(panes);
  stop.disabled = false;
  element.result.scrollIntoView({ block: "nearest" });
  try {
    // One after the other: texts that share passes draft less, and their figures would say little.
    for (const [index, asked] of requests.entries()) {
      report(`Writing: ${asked.decoding.policy} …`);
      await show(panes[index], panes, asked, own.signal);
    }
    conclude(panes);
  } catch (error) {
    if (own !== running) return; // another run has begun
    if (own.signal.aborted) report("Stopped");
    else fail(error);
  }
  if (document.activeElement === stop) run.focus();
  stop.disabled = true;
  running = null;
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
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    form.requestSubmit();
  }
});
