/** One line per request: its phase in words and colour, its prompt and output as one bar. */
import { facts, h, painter, roving, setText, tipOf, tipped, wire } from "../_shared.js";

const WORDS = { waiting: "waiting", prefilling: "prefilling", decoding: "decoding", parked: "set aside", preempted: "preempted" };

/** Where a request is, in words. */
export function requestText(request) {
  const { title, state, prompt, output, computed, cached, blocks, priority, preemptions } = request;
  const parts = [`${title}: ${WORDS[state] ?? state}`, `${computed} of ${prompt + output} tokens have keys and values (prompt ${prompt}, output ${output})`];
  parts.push(`${blocks} blocks`);
  if (cached) parts.push(`${cached} prompt tokens came from the prefix cache`);
  if (priority) parts.push(`priority ${priority}`);
  if (preemptions) parts.push(`preempted ${preemptions} times`);
  return parts.join(", ");
}

/** Percent of the bar that each part takes, the longest request being the whole bar. */
export function widths({ prompt, output, computed }, longest) {
  const percent = (tokens) => (100 * tokens) / Math.max(1, longest);
  const done = Math.min(computed, prompt);
  return { done: percent(done), todo: percent(prompt - done), output: percent(output) };
}

function lane() {
  const title = h("span", { class: "title" });
  const swatch = h("span", { class: "s-swatch", "aria-hidden": true });
  const state = h("span", { class: "state" });
  const parts = ["done", "todo", "output"].map((name) => h("span", { class: `part ${name}` }));
  const bar = h("span", { class: "bar", "aria-hidden": true }, ...parts);
  const count = h("span", { class: "count" });
  const tip = tipOf();
  const node = h("li", { class: "lane s-tipped", ...tipped }, swatch, title, state, bar, count, tip);
  function show(request, longest) {
    swatch.style.setProperty("background", `var(--s-r${request.color})`);
    node.style.setProperty("--own", `var(--s-r${request.color})`);
    setText(title, request.title);
    setText(state, WORDS[request.state] ?? request.state);
    node.setAttribute("data-state", request.state);
    const shares = widths(request, longest);
    parts.forEach((part, i) => (part.style.width = `${[shares.done, shares.todo, shares.output][i]}%`));
    setText(count, `${request.prompt} + ${request.output}`);
    setText(tip, requestText(request));
  }
  return { node, show };
}

function render({ model, el }) {
  el.classList.add("strata", "strata-batch-lanes");
  const totals = facts("Requests");
  const list = h("ul", { class: "lanes", "aria-label": "Requests, those that run first" });
  const empty = h("p", { class: "s-empty" }, "No request is running or waiting. Press Generate, or add load.");
  const more = h("p", { class: "s-note" });
  const legend = h("p", { class: "s-note" }, "Bar: prompt computed (pale), prompt to do (hatched), output (full). Figures: prompt + output tokens.");
  el.append(h("h3", { class: "s-heading" }, "Batch and queue"), totals.node, empty, list, more, legend);
  const lanes = [];
  const stops = roving(list);

  const paint = painter(() => {
    const requests = model.get("requests");
    const changed = lanes.length !== requests.length;
    const longest = Math.max(1, ...requests.map(({ prompt, output }) => prompt + output));
    while (lanes.length > requests.length) lanes.pop().node.remove();
    while (lanes.length < requests.length) {
      lanes.push(lane());
      list.append(lanes.at(-1).node);
    }
    requests.forEach((request, i) => lanes[i].show(request, longest));
    if (changed) stops.settle();
    empty.hidden = requests.length > 0;
    legend.hidden = requests.length === 0;
    const count = model.get("num_more");
    more.hidden = count === 0;
    setText(more, `and ${count} more`);
    totals.show(model.get("totals"));
  }, el);
  const wired = wire(model);
  for (const key of ["requests", "num_more", "totals"]) wired.on(`change:${key}`, paint.mark);
  paint.mark();
  return () => {
    wired.off();
    paint.stop();
  };
}

export default { render };
