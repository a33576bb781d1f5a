/** A prompt, how to sample from it, Generate and Stop. Nothing that was typed is ever lost by an error. */
import { freshId, h, painter, quiet, setText, wire } from "../_shared.js";

const FIELDS = ["prompt", "num_streams", "max_tokens", "temperature", "chat"];
const NUMBERS = [
  ["num_streams", "streams", "How many copies of the prompt run side by side, each with its own seed."],
  ["max_tokens", "max tokens", "Most tokens to generate per stream."],
  ["temperature", "temperature", "0 always takes the most likely token, so all streams are alike; 0.7 varies."],
];

/** Numbers as numbers; anything else as it was typed, for the kernel to refuse in words. */
export function fieldValue(text) {
  const value = Number(text);
  return text.trim() === "" || !Number.isFinite(value) ? text : value;
}

function render({ model, el }) {
  el.classList.add("strata", "strata-prompt-box");
  const id = freshId("prompt");
  const inputs = {};
  inputs.prompt = h("textarea", { ...quiet, id, rows: 2, spellcheck: false, "aria-errormessage": `${id}-problem` });
  const numbers = NUMBERS.map(([name, label, tip]) => {
    const own = `${id}-${name}`;
    inputs[name] = h("input", { ...quiet, id: own, type: "text", inputmode: "decimal", autocomplete: "off" });
    inputs[name].setAttribute("aria-describedby", `${own}-tip`);
    const bubble = h("div", { class: "s-tip", role: "tooltip", id: `${own}-tip` }, tip);
    return h("div", { class: "field s-tipped" }, h("label", { for: own }, label), inputs[name], bubble);
  });
  inputs.chat = h("input", { ...quiet, id: `${id}-chat`, type: "checkbox" });
  const chatTip = "Send the prompt as a chat message in the model's own template; off continues the bare text.";
  const chat = h("div", { class: "field s-tipped" }, inputs.chat, h("label", { for: `${id}-chat` }, "chat template"));
  chat.append(h("div", { class: "s-tip", role: "tooltip" }, chatTip));
  const generate = h("button", { ...quiet, type: "button", class: "generate", title: "Ctrl+Enter" }, "Generate");
  const stop = h("button", { ...quiet, type: "button", class: "stop" }, "Stop");
  const problem = h("p", { class: "problem", id: `${id}-problem` });
  const buttons = h("div", { class: "buttons" }, stop, generate);
  el.append(
    h("label", { class: "s-heading", for: id }, "Prompt"),
    inputs.prompt,
    h("div", { class: "controls" }, ...numbers, chat, buttons),
    problem,
  );

  let waitingFor = null; // number of the answer that was on screen when Generate was pressed
  const typed = (name) => (name === "chat" ? inputs.chat.checked : inputs[name].value);
  const read = (name) => (name === "prompt" || name === "chat" ? typed(name) : fieldValue(typed(name)));

  function keep(name) {
    const value = read(name);
    if (typeof value !== typeof model.get(name)) return; // half typed; stays on this page
    if ((name === "num_streams" || name === "max_tokens") && !Number.isInteger(value)) return;
    model.set(name, value);
    model.save_changes();
  }
  function send() {
    if (!model.get("enabled") || waitingFor !== null) return;
    waitingFor = model.get("answer").number ?? 0;
    model.send({ kind: "generate", fields: Object.fromEntries(FIELDS.map((name) => [name, read(name)])) });
    paint.mark();
  }
  for (const name of FIELDS) inputs[name].addEventListener("change", () => keep(name));
  inputs.prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      keep("prompt");
      send();
    }
  });
  generate.addEventListener("click", send);
  stop.addEventListener("click", () => model.send({ kind: "stop" }));

  function fill(name) {
    if (name === "chat") inputs.chat.checked = model.get("chat") && model.get("can_chat");
    else if (inputs[name].value !== String(model.get(name))) inputs[name].value = model.get(name);
  }
  const paint = painter(() => {
    const answer = model.get("answer");
    if (waitingFor !== null && (answer.number ?? 0) !== waitingFor) waitingFor = null;
    const failed = answer.ok === false && waitingFor === null;
    const enabled = model.get("enabled");
    generate.disabled = !enabled || waitingFor !== null;
    setText(generate, waitingFor === null ? "Generate" : "Waiting for the kernel");
    stop.disabled = !enabled || model.get("num_unfinished") === 0;
    inputs.chat.disabled = !model.get("can_chat");
    inputs.prompt.setAttribute("aria-invalid", failed);
    problem.hidden = !failed;
    setText(problem, failed ? answer.text : "");
  });

  const wired = wire(model);
  for (const name of FIELDS) wired.on(`change:${name}`, () => fill(name));
  wired.on("change:can_chat", () => fill("chat"));
  for (const key of ["answer", "enabled", "num_unfinished", "can_chat"]) wired.on(`change:${key}`, paint.mark);
  FIELDS.forEach(fill);
  paint.mark();
  return () => {
    wired.off();
    paint.stop();
  };
}

export default { render };
