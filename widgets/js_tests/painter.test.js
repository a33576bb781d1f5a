import assert from "node:assert/strict";
import { beforeEach, mock, test } from "node:test";
import { installPage } from "./fake_page.js";
import { painter } from "../strata_widgets/_shared.js";

let page, drawn;
beforeEach(() => {
  page = installPage();
  drawn = 0;
  mock.timers.reset();
  mock.timers.enable({ apis: ["setTimeout"] });
});

test("many marks are one paint", () => {
  const paint = painter(() => (drawn += 1), document.body);
  for (let i = 0; i < 5; i += 1) paint.mark();
  page.paint();
  assert.equal(drawn, 1);
});

test("what nobody sees is painted once a second, and at once when it comes into sight", () => {
  const paint = painter(() => (drawn += 1), document.body);
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
  const paint = painter(() => (drawn += 1));
  assert.equal(page.observers.active, 0);
  paint.mark();
  page.paint();
  assert.equal(drawn, 1);
});

test("after its end nothing is painted and nobody watches", () => {
  const paint = painter(() => (drawn += 1), document.body);
  page.observers.sights[0](false);
  paint.mark();
  paint.stop();
  mock.timers.tick(2000);
  page.paint();
  assert.deepEqual([drawn, page.observers.active], [0, 0]);
});
