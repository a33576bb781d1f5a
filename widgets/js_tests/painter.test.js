import assert from "node:assert/strict";
import { beforeEach, mock, test } from "node:test";
import { installPage } from "./fake_page.js";
import { painter } from "../strata_widgets/_shared.js";

let page, drawn;
beforeEach(() => {
  page = installPage();
  drawn = 0;
});

test("many marks are one paint", () => {
  const paint = painter(() => void (drawn += 1), document.body);
  for (let i = 0; i < 5; i += 1) paint.mark();
  page.paint();
  assert.equal(drawn, 1);
});

test("all panels with news are painted in one frame, and one panel's trouble is not the others'", () => {
  const told = mock.method(console, "error", () => {});
  const panels = [0, 1, 2].map((i) =>
    painter(() => {
      drawn += 1;
      if (i === 0) throw new Error("a panel");
    }, document.body),
  );
  for (const { mark } of panels) {
    mark();
    mock.timers.tick(10);
  }
  assert.equal(page.paint(), 1);
  assert.equal(drawn, 3);
  assert.equal(told.mock.callCount(), 1);
});

test("what asks the page for places runs after all panels are drawn", () => {
  const order = [];
  const panels = [0, 1].map((i) =>
    painter(() => {
      order.push(`draw ${i}`);
      return () => order.push(`after ${i}`);
    }, document.body),
  );
  panels.forEach(({ mark }) => mark());
  page.paint();
  assert.deepEqual(order, ["draw 0", "draw 1", "after 0", "after 1"]);
  panels[0].soon();
  page.paint();
  assert.deepEqual(order.slice(4), ["draw 0", "after 0"]);
});

test("what a hand does is painted in the next frame, and not again with the news", () => {
  const paint = painter(() => void (drawn += 1), document.body);
  paint.mark();
  paint.soon();
  page.paint();
  page.paint();
  assert.equal(drawn, 1);
});

test("what nobody sees is painted once a second, and at once when it comes into sight", () => {
  const paint = painter(() => void (drawn += 1), document.body);
  const [see] = page.observers.sights;
  see(false);
  for (let i = 0; i < 10; i += 1) paint.mark();
  assert.equal(page.pending(), 0);
  mock.timers.tick(1000);
  page.paint();
  assert.equal(drawn, 1);
  paint.mark();
  see(true);
  page.paint();
  assert.equal(drawn, 2);
  mock.timers.tick(2000);
  assert.equal(page.pending(), 0, "what was painted is not painted again");
});

test("a control is painted in the next frame, wherever it is", () => {
  const paint = painter(() => void (drawn += 1));
  assert.equal(page.observers.active, 0);
  paint.mark();
  page.paint();
  assert.equal(drawn, 1);
});

test("after its end nothing is painted and nobody watches", () => {
  const paint = painter(() => void (drawn += 1), document.body);
  page.observers.sights[0](false);
  paint.mark();
  paint.stop();
  mock.timers.tick(2000);
  page.paint();
  assert.deepEqual([drawn, page.observers.active], [0, 0]);
});
