/** What every view needs: elements, number formats, one paint per frame. Text is set as text, never as HTML. */

/** An element with attributes, `on…` listeners, `data`, and children (nodes or text). */
export function h(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, String(value));
  }
  node.append(...children);
  return node;
}

/** Attributes of every input: notebook shortcuts must not fire while it has the focus. */
export const quiet = { "data-lm-suppress-shortcuts": "true" };

/** Set text only when it differs, so that selections and screen readers are left alone. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Listeners on a model that can all be removed again. */
export function wire(model) {
  const made = [];
  return {
    on(event, handler) {
      model.on(event, handler);
      made.push([event, handler]);
    },
    off() {
      for (const [event, handler] of made) model.off(event, handler);
    },
  };
}

const OUT_OF_SIGHT_MS = 1000; // between two paints of what nobody sees, but a screen reader may read
const GATHER_MS = 60; // news of one reading of the engine reaches all panels within that time

/** Paints of all panels that wait for their common frame. Each view is a module of its own, so they meet on the page. */
const waiting = (globalThis[Symbol.for("strata-lab.waiting-paints")] ??= new Set());

function paintTogether() {
  const due = [...waiting];
  waiting.clear();
  const attempt = (paint) => {
    try {
      return paint();
    } catch (error) {
      console.error(error); // one panel's trouble is not the others'
    }
  };
  for (const after of due.map(attempt)) if (after) attempt(after);
}

/** Run `paint` in a frame that it shares with whatever else is gathered within `GATHER_MS`. */
function gather(paint) {
  if (!waiting.size) setTimeout(() => requestAnimationFrame(paintTogether), GATHER_MS);
  waiting.add(paint);
}

/**
 * Run `draw` after `mark()`: in the next animation frame; where a `node` is given, in a frame shared with the other
 * panels, since each frame costs a layout and a painting of the page, and where nobody sees the node, after a second.
 * Controls give none: their answers must not wait. `soon()` is for what a hand does: the next frame in any case.
 *
 * `draw` asks the page for no place or size, because every answer after a change is a layout of its own. What must ask
 * goes into a function that `draw` returns: it runs when all panels are drawn.
 */
export function painter(draw, node = null) {
  let [frame, timer, inSight] = [0, 0, true];
  const paint = () => {
    clearTimeout(timer);
    cancelAnimationFrame(frame);
    waiting.delete(paint);
    [frame, timer] = [0, 0];
    return draw();
  };
  const soon = () => {
    frame ||= requestAnimationFrame(() => paint()?.());
  };
  const watcher =
    node === null || typeof IntersectionObserver === "undefined"
      ? null
      : new IntersectionObserver((changes) => {
          inSight = changes.at(-1).isIntersecting;
          if (inSight && timer) soon();
        });
  watcher?.observe(node);
  return {
    soon,
    mark() {
      if (node === null) soon();
      else if (inSight) gather(paint);
      else timer ||= setTimeout(gather, OUT_OF_SIGHT_MS, paint);
    },
    stop() {
      watcher?.disconnect();
      clearTimeout(timer);
      cancelAnimationFrame(frame);
      waiting.delete(paint);
      [frame, timer] = [0, 0];
    },
  };
}

/** 0.42, 4.2, 42, 1 234; a dash for what is not known. */
export function rate(value) {
  if (value == null || !Number.isFinite(value)) return "–";
  if (value >= 1000) return Math.round(value).toLocaleString("en").replaceAll(",", "\u202f");
  return value >= 100 ? value.toFixed(0) : value >= 1 ? value.toFixed(1) : value.toFixed(2);
}

/** Ids that stay unique when the same widget is shown twice. */
export function freshId(stem) {
  freshId.count = (freshId.count ?? 0) + 1;
  return `strata-${stem}-${freshId.count}-${Math.random().toString(36).slice(2, 8)}`;
}

/** Attributes of a number that says on hover and focus where it comes from; one Tab stop among its neighbours. */
export const tipped = { ...quiet, tabindex: -1 };

/** What a tipped number says. */
export const tipOf = (...words) => h("div", { class: "s-tip", role: "tooltip" }, ...words);

/**
 * One Tab stop for all children of `node`: arrow keys, Home and End move among them.
 * `settle()` after children came or went; `replace(...children)` puts others in their place and keeps the focus.
 */
export function roving(node) {
  let current = 0;
  const all = () => [...node.childNodes];
  function settle() {
    const items = all();
    current = Math.min(current, Math.max(0, items.length - 1));
    items.forEach((item, i) => item.setAttribute("tabindex", i === current ? 0 : -1));
  }
  function replace(...children) {
    const held = all().includes(document.activeElement);
    node.replaceChildren(...children);
    settle();
    if (held) all()[current]?.focus();
  }
  node.addEventListener("focusin", (event) => {
    const at = all().indexOf(event.target);
    if (at < 0 || at === current) return;
    current = at;
    settle();
  });
  node.addEventListener("keydown", (event) => {
    const items = all();
    const [at, last] = [items.indexOf(event.target), items.length - 1];
    const moves = { ArrowLeft: at - 1, ArrowUp: at - 1, ArrowRight: at + 1, ArrowDown: at + 1, Home: 0, End: last };
    if (at < 0 || !(event.key in moves)) return;
    event.preventDefault();
    event.stopPropagation();
    current = Math.min(last, Math.max(0, moves[event.key]));
    settle();
    items[current].focus();
  });
  return { settle, replace };
}

/** A line of numbers, each with its formula on hover and focus; `show` redraws only when something differs. */
export function facts(label) {
  const node = h("ul", { class: "s-facts", "aria-label": label });
  const rows = [];
  const stops = roving(node);
  const make = () => {
    const [name, value, tip] = [h("span"), h("b"), tipOf()];
    return { node: h("li", { class: "s-tipped", ...tipped }, name, " ", value, tip), name, value, tip };
  };
  function show(list) {
    const changed = rows.length !== list.length;
    while (rows.length > list.length) rows.pop().node.remove();
    while (rows.length < list.length) {
      rows.push(make());
      node.append(rows.at(-1).node);
    }
    list.forEach((fact, i) => {
      setText(rows[i].name, fact.label);
      setText(rows[i].value, String(fact.value));
      setText(rows[i].tip, fact.tip);
    });
    if (changed) stops.settle();
  }
  return { node, show };
}
