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

/** Run `draw` at most once per animation frame, and only after `mark()`. */
export function painter(draw) {
  let frame = 0;
  return {
    mark() {
      if (!frame) {
        frame = requestAnimationFrame(() => {
          frame = 0;
          draw();
        });
      }
    },
    stop() {
      cancelAnimationFrame(frame);
      frame = 0;
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

/** A line of numbers, each with its formula on hover and focus; `show` redraws only when something differs. */
export function facts(label) {
  const node = h("ul", { class: "s-facts", "aria-label": label });
  const rows = [];
  const make = () => {
    const [name, value] = [h("span"), h("b")];
    const tip = h("div", { class: "s-tip", role: "tooltip" });
    return { node: h("li", { class: "s-tipped", tabindex: 0 }, name, " ", value, tip), name, value, tip };
  };
  function show(list) {
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
  }
  return { node, show };
}
