/** Text lanes: the chosen one large, the others one line each. Text arrives by records and is repaired by snapshots. */
import { h, painter, quiet, rate, setText, tipOf, wire } from "../_shared.js";

export const KEPT = 20000; // characters per lane kept on the page
const STATUS_TIP =
  "Tokens: TokenEvents of this stream. tok/s: (tokens − 1) / (time from first to last token), over its tokens of the last second. " +
  "Proposals taken: drafts that came true / drafts verified (StepEvent.drafts).";
const TAIL = 200; // characters of a one-line lane

/** The text of lanes, built from append records and snapshots that may come in any order. */
export class Texts {
  constructor() {
    this.lanes = new Map(); // id -> {end, text}
  }
  text(id) {
    return this.lanes.get(id)?.text ?? "";
  }
  /** Add a piece if it continues what is here; a piece with a gap before it waits for the next snapshot. */
  append({ id, start, end, text, drafted = [] }) {
    const lane = this.lanes.get(id) ?? { end: 0, text: "", drafted: [] };
    if (lane.end !== start) return;
    const marks = (lane.drafted ?? []).concat(drafted).filter(([, to]) => to > end - KEPT);
    this.lanes.set(id, { end, text: (lane.text + text).slice(-KEPT), drafted: marks });
  }
  /** Parts of `text(id)` that a drafter proposed, as `[from, to)`. */
  drafted(id) {
    const { end = 0, text = "", drafted = [] } = this.lanes.get(id) ?? {};
    const first = end - text.length;
    return drafted.map(([from, to]) => [Math.max(0, from - first), to - first]).filter(([from, to]) => to > from && to <= text.length);
  }
  /** Take over what is further along than what is here, and forget lanes that are gone. */
  repair(snapshot, known) {
    for (const { id, end, text } of snapshot) {
      if (end > (this.lanes.get(id)?.end ?? -1)) this.lanes.set(id, { end, text: text.slice(-KEPT) });
    }
    for (const id of this.lanes.keys()) if (!known.has(id)) this.lanes.delete(id);
  }
}

/** "128 tokens, 41.2 tok/s, stopped at its end" */
export function statusOf({ state, note, num_tokens: count, rate: speed, phase, accepted }) {
  if (state === "waiting") return note || phase || "waiting";
  const parts = [`${count} token${count === 1 ? "" : "s"}`];
  if (speed != null) parts.push(`${rate(speed)} tok/s`);
  if (accepted != null) parts.push(`${Math.round(accepted * 100)} % of proposals taken`);
  if (note) parts.push(note);
  else if (phase && phase !== "decoding") parts.push(phase);
  return parts.join(" · ");
}

const DRAFTED = "strata-drafted"; // name of the page's highlight, which needs no elements inside the text

/** Mark parts of a text node as proposed by a drafter, in place of those marked before. */
function highlight(text, parts, marked) {
  if (!globalThis.CSS?.highlights || !globalThis.Highlight) return [];
  if (!CSS.highlights.has(DRAFTED)) CSS.highlights.set(DRAFTED, new Highlight());
  const shared = CSS.highlights.get(DRAFTED);
  for (const range of marked) shared.delete(range);
  return parts.map(([from, to]) => {
    const range = new StaticRange({ startContainer: text, startOffset: from, endContainer: text, endOffset: to });
    shared.add(range);
    return range;
  });
}

function largeLane() {
  const swatch = h("span", { class: "s-swatch", "aria-hidden": true });
  const title = h("h3", { class: "s-heading" });
  const status = h("span", {});
  const told = h("span", { ...quiet, class: "status s-tipped", tabindex: 0 }, status, tipOf(STATUS_TIP));
  const prompt = h("p", { class: "prompt" });
  const body = h("div", { ...quiet, class: "text", tabindex: 0, role: "region", "aria-live": "off" });
  const node = h("article", { class: "large" }, h("header", {}, swatch, title, told), prompt, body);
  let text = document.createTextNode("");
  body.append(text);
  let shown = null;
  let marked = [];
  let pinned = true; // to the end of the text, until somebody scrolls up
  body.addEventListener("scroll", () => (pinned = body.scrollHeight - body.scrollTop - body.clientHeight < 30));
  /** Returns what keeps the end in sight. */
  function show(lane, now, drafted) {
    swatch.style.setProperty("background", `var(--s-r${lane.color})`);
    node.setAttribute("data-phase", lane.phase);
    setText(title, lane.title);
    setText(status, statusOf(lane));
    node.setAttribute("data-state", lane.state);
    setText(prompt, lane.prompt);
    body.setAttribute("aria-label", `Text of ${lane.title.toLowerCase()}`);
    if (shown === lane.id && now.startsWith(text.data)) {
      if (now.length > text.data.length) text.appendData(now.slice(text.data.length)); // keeps the reader's selection
    } else {
      text = document.createTextNode(now);
      body.replaceChildren(text);
    }
    if (marked.length || drafted.length) marked = highlight(text, drafted, marked);
    pinned ||= shown !== lane.id;
    shown = lane.id;
    return () => pinned && (body.scrollTop = body.scrollHeight);
  }
  const forget = () => highlight(text, [], marked);
  return { node, show, forget };
}

function smallLane(choose) {
  const title = h("span", { class: "title" });
  const tail = h("span", { class: "tail" });
  const status = h("span", { class: "status" });
  const swatch = h("span", { class: "s-swatch", "aria-hidden": true });
  const node = h("button", { ...quiet, type: "button", class: "small" }, swatch, title, h("span", { class: "clip" }, tail), status);
  let id = null;
  node.addEventListener("click", () => choose(id));
  function show(lane, now) {
    id = lane.id;
    swatch.style.setProperty("background", `var(--s-r${lane.color})`);
    node.setAttribute("data-phase", lane.phase);
    setText(title, lane.title);
    setText(tail, now.slice(-TAIL).replaceAll(/\s+/g, " "));
    setText(status, lane.rate == null ? lane.phase || lane.state : `${rate(lane.rate)} tok/s`);
    node.setAttribute("data-state", lane.state);
    node.setAttribute("aria-label", `${lane.title}: ${statusOf(lane)}. Show its text large`);
  }
  return { node, show };
}

function render({ model, el }) {
  el.classList.add("strata", "strata-token-stream");
  const texts = new Texts();
  const large = largeLane();
  const small = [];
  const list = h("div", { class: "others" });
  const empty = h("p", { class: "empty" }, "Text appears here, one lane per stream.");
  el.setAttribute("role", "group");
  el.setAttribute("aria-label", "Generated text");
  el.append(empty, large.node, list);
  let chosen = null;

  const paint = painter(() => {
    const lanes = model.get("lanes");
    empty.hidden = lanes.length > 0;
    large.node.hidden = lanes.length === 0;
    if (!lanes.some((lane) => lane.id === chosen)) chosen = lanes[0]?.id ?? null;
    const first = lanes.find((lane) => lane.id === chosen);
    const follow = first && large.show(first, texts.text(first.id), texts.drafted(first.id));
    const others = lanes.filter((lane) => lane.id !== chosen);
    while (small.length > others.length) small.pop().node.remove();
    while (small.length < others.length) {
      const lane = smallLane((id) => {
        chosen = id;
        paint.soon();
      });
      small.push(lane);
      list.append(lane.node);
    }
    others.forEach((lane, i) => small[i].show(lane, texts.text(lane.id)));
    return follow;
  }, el);
  function repair() {
    const snapshot = model.get("snapshot");
    const known = new Set([...model.get("lanes"), ...snapshot].map((lane) => lane.id));
    texts.repair(snapshot, known);
    paint.mark();
  }

  const wired = wire(model);
  wired.on("change:lanes", paint.mark);
  wired.on("change:snapshot", repair);
  wired.on("msg:custom", (content) => {
    for (const record of content.records ?? []) record.append?.forEach((piece) => texts.append(piece));
    paint.mark();
  });
  repair();
  return () => {
    wired.off();
    paint.stop();
    large.forget();
  };
}

export default { render };
