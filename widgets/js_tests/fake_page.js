/** A page and a widget model of a few lines each: enough to render a view under node, without any package. */
import { mock } from "node:test";

class Style {
  setProperty(name, value) {
    this[name] = value;
  }
}

class Node {
  constructor(tag) {
    Object.assign(this, { tag, parent: null, childNodes: [], attributes: {}, listeners: {}, style: new Style(), hidden: false });
    this.ownValue = "";
    Object.assign(this, { checked: false, disabled: false, scrollTop: 0, scrollHeight: 0, clientHeight: 0 });
    this.clientWidth = 640;
    this.classes = new Set();
    this.classList = {
      add: (...names) => names.forEach((name) => this.classes.add(name)),
      toggle: (name, on) => (on ? this.classes.add(name) : this.classes.delete(name)),
      contains: (name) => this.classes.has(name),
    };
  }
  get value() {
    return this.ownValue;
  }
  set value(value) {
    this.ownValue = String(value);
  }
  setAttribute(name, value) {
    this.attributes[name] = String(value);
    if (name === "class") this.classes = new Set(String(value).split(" ").filter(Boolean));
    if (name === "value") this.value = String(value);
  }
  getAttribute(name) {
    return this.attributes[name] ?? null;
  }
  removeAttribute(name) {
    delete this.attributes[name];
  }
  append(...children) {
    for (const child of children) {
      const node = child instanceof Node ? child : document.createTextNode(child);
      node.parent = this;
      this.childNodes.push(node);
    }
  }
  replaceChildren(...children) {
    this.childNodes = [];
    this.append(...children);
  }
  remove() {
    this.parent.childNodes = this.parent.childNodes.filter((node) => node !== this);
  }
  get textContent() {
    return this.tag === "#text" ? this.data : this.childNodes.map((node) => node.textContent).join("");
  }
  set textContent(text) {
    this.replaceChildren(document.createTextNode(text));
  }
  set innerHTML(_text) {
    throw new Error("views set text, never HTML");
  }
  appendData(text) {
    this.data += text;
  }
  addEventListener(type, handler) {
    (this.listeners[type] ??= []).push(handler);
  }
  /** Fire an event; whether its default action was prevented. */
  fire(type, event = {}) {
    let prevented = false;
    const given = { preventDefault: () => (prevented = true), stopPropagation() {}, ...event };
    for (const handler of this.listeners[type] ?? []) handler(given);
    return prevented;
  }
  focus() {
    document.activeElement = this;
    for (let node = this; node; node = node.parent) for (const handler of node.listeners.focusin ?? []) handler({ target: this });
  }
  getContext() {
    this.drawing ??= new Drawing();
    return this.drawing;
  }
  /** All nodes below that satisfy `test`, in order. */
  all(test) {
    return this.childNodes.flatMap((node) => [...(test(node) ? [node] : []), ...node.all(test)]);
  }
  find(test) {
    return this.all(test)[0];
  }
}

/** A canvas context that remembers texts and lines. */
class Drawing {
  constructor() {
    Object.assign(this, { texts: [], dashes: [], moves: [], rects: [], fillStyle: "" });
  }
  fillRect(x, y, width, height) {
    this.rects.push({ x, y, width, height, fill: this.fillStyle });
  }
  strokeRect() {}
  clearRect() {}
  fillText(text) {
    this.texts.push(String(text));
  }
  setLineDash(dash) {
    this.dashes.push(dash);
  }
  measureText(text) {
    return { width: String(text).length * 6 };
  }
  moveTo(x, y) {
    this.moves.push([x, y]);
  }
  lineTo(x, y) {
    this.moves.push([x, y]);
  }
  scale() {}
  beginPath() {}
  stroke() {}
  fill() {}
  arc() {}
}

export function installPage() {
  mock.timers.reset();
  mock.timers.enable({ apis: ["setTimeout"] });
  const observers = { active: 0, sights: [] };
  class Observer {
    observe() {
      observers.active += 1;
    }
    disconnect() {
      observers.active -= 1;
    }
  }
  class Sight extends Observer {
    constructor(tell) {
      super();
      observers.sights.push((isIntersecting) => tell([{ isIntersecting }]));
    }
  }
  let frames = new Map();
  let count = 0;
  globalThis.document = {
    createElement: (tag) => new Node(tag),
    createTextNode: (data) => Object.assign(new Node("#text"), { data: String(data) }),
    body: new Node("body"),
    activeElement: null,
  };
  globalThis.requestAnimationFrame = (draw) => {
    frames.set(++count, draw);
    return count;
  };
  globalThis.cancelAnimationFrame = (id) => frames.delete(id);
  globalThis.getComputedStyle = () => ({ getPropertyValue: () => "", fontFamily: "sans-serif", color: "#111" });
  globalThis.ResizeObserver = Observer;
  globalThis.MutationObserver = Observer;
  globalThis.IntersectionObserver = Sight;
  /** Let the panels gather their news, then run what waits for the next frame; how many draws that were. */
  const paint = () => {
    mock.timers.tick(60);
    const due = [...frames.values()];
    frames = new Map();
    for (const draw of due) draw();
    return due.length;
  };
  return { paint, observers, pending: () => frames.size };
}

/** A widget model: traits, listeners, what was sent and saved. */
export class FakeModel {
  constructor(state) {
    Object.assign(this, { state: { ...state }, handlers: [], sent: [], saved: 0 });
  }
  get(name) {
    if (!(name in this.state)) throw new Error(`the view asks for ${name}, which is no trait`);
    return this.state[name];
  }
  set(name, value) {
    this.state[name] = value;
  }
  save_changes() {
    this.saved += 1;
  }
  send(content) {
    this.sent.push(content);
  }
  on(event, handler) {
    this.handlers.push([event, handler]);
  }
  off(event, handler) {
    this.handlers = this.handlers.filter(([e, h]) => e !== event || h !== handler);
  }
  /** The kernel changed traits. */
  update(state) {
    Object.assign(this.state, state);
    for (const name of Object.keys(state)) this.emit(`change:${name}`);
  }
  /** The kernel sent a message. */
  message(content, buffers = []) {
    this.emit("msg:custom", content, buffers);
  }
  emit(event, ...payload) {
    for (const [name, handler] of [...this.handlers]) if (name === event) handler(...payload);
  }
}

/** Render a view into a fresh element. */
export function show(view, model) {
  const el = document.createElement("div");
  const cleanup = view.render({ model, el });
  return { el, cleanup };
}
