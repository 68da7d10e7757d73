// Tabs, the server's health, keys.

import { models } from "./api.js";
import * as chat from "./chat.js";
import * as race from "./race.js";

const VIEWS = { chat, race };
const RETRY_MS = 1500;
const $ = (id) => document.getElementById(id);

let waiting = false;

function select(name, focus = false) {
  for (const view of Object.keys(VIEWS)) {
    const chosen = view === name;
    $(view).hidden = !chosen;
    $(`tab-${view}`).setAttribute("aria-selected", String(chosen));
    $(`tab-${view}`).tabIndex = chosen ? 0 : -1;
  }
  if (focus) $(`tab-${name}`).focus();
  history.replaceState(null, "", `#${name}`);
}

/** Learn the model's name; while the server loads or is gone, say so and ask again. */
async function connect() {
  waiting = true;
  for (;;) {
    try {
      const [model] = await models();
      $("model").textContent = `${model.id} · up to ${model.max_model_len} tokens`;
      for (const view of Object.values(VIEWS)) view.setModel(model.id);
      $("banner").hidden = true;
      break;
    } catch (error) {
      $("banner").textContent =
        error.status === 503 ? "The model is loading…" : error.status ? error.message : "The server does not answer. Trying again…";
      $("banner").hidden = false;
    }
    await new Promise((done) => setTimeout(done, RETRY_MS));
  }
  waiting = false;
}

function lost() {
  if (!waiting) connect();
}

for (const name of Object.keys(VIEWS)) {
  const tab = $(`tab-${name}`);
  tab.onclick = () => select(name);
  tab.onkeydown = (event) => {
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") select(name === "chat" ? "race" : "chat", true);
  };
  VIEWS[name].begin(lost);
}
addEventListener("keydown", (event) => {
  if (event.key === "Escape") for (const view of Object.values(VIEWS)) view.stop();
});
select(location.hash === "#race" ? "race" : "chat");
connect();
