// Begins: asks for a key where one is wanted, then looks at the router again and again.

import { Unauthorized, askJson, hasKey, useKey } from "./ask.js";
import { drawCalls, drawLegend } from "./calls.js";
import { startChat } from "./chat.js";
import { byId } from "./draw.js";
import { animate, drawFleet, drawLinks } from "./fleet.js";
import { drawNumbers } from "./numbers.js";

const EVERY_MS = 1000;
const AGAIN_MS = 3000; // after a failure
const CALLS = 24;
const THEME = "tandem-theme";

let timer = null;
let looks = 0;

async function look() {
  clearTimeout(timer);
  const turn = ++looks;
  let wait = EVERY_MS;
  try {
    if (!document.hidden) {
      const [fleet, calls] = await Promise.all([
        askJson("debug/fleet"),
        askJson(`debug/requests?limit=${CALLS}`),
      ]);
      if (turn !== looks) return;
      draw(fleet, calls.requests);
    }
  } catch (error) {
    if (turn !== looks) return;
    if (error instanceof Unauthorized) return wantKey(hasKey() ? error.message : "");
    setState(`no answer: ${error.message}`, "lost");
    wait = AGAIN_MS;
  }
  timer = setTimeout(look, wait);
}

function draw(fleet, calls) {
  byId("main").hidden = false;
  byId("key-form").hidden = true;
  const models = [...new Set(fleet.workers.map((each) => each.model))];
  byId("model").textContent = models.join(", ") || "no worker yet";
  drawNumbers(fleet);
  drawFleet(fleet);
  drawLinks(fleet);
  drawCalls(calls);
  setState("live", "live");
}

function setState(words, look) {
  byId("state").textContent = words;
  byId("state").className = `state ${look}`;
}

function wantKey(problem) {
  clearTimeout(timer);
  byId("main").hidden = true;
  byId("key-form").hidden = false;
  byId("key-error").textContent = problem;
  setState("wants a key", "lost");
  byId("key").focus();
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(byId("key").value);
  byId("key").value = "";
  look();
});
byId("change-key").addEventListener("click", () => {
  useKey("");
  looks += 1;
  wantKey("");
});
byId("theme").addEventListener("click", () => {
  const dark = getComputedStyle(document.documentElement).colorScheme === "dark";
  setTheme(dark ? "light" : "dark");
});

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  localStorage.setItem(THEME, theme);
}

function fail(error) {
  if (error instanceof Unauthorized) wantKey(error.message);
}

const theme = localStorage.getItem(THEME);
if (theme === "light" || theme === "dark") setTheme(theme);
drawLegend();
startChat(fail);
animate();
look();
