"use strict";
// The page of the server: chat, load, kernels. It calls the server's own routes only.
const $ = id => document.getElementById(id);
const TABS = ["chat", "load", "kernels"];
const KEPT = 120; // seconds of history
let key = sessionStorage.getItem("gristmill-key") || "";
let messages = [], running = null, last = null, model = "";
const history = {};

function headers() {
  const all = { "content-type": "application/json" };
  if (key) all.authorization = "Bearer " + key;
  return all;
}

async function call(path, options = {}) {
  const answer = await fetch(path, { ...options, headers: headers() });
  if (answer.status === 401) { $("access").hidden = false; throw new Error("this server asks for an API key"); }
  if (!answer.ok) {
    const body = await answer.json().catch(() => ({}));
    throw new Error(body.error?.message || "HTTP " + answer.status);
  }
  return answer;
}

// Tabs, by mouse and by arrow keys.
function choose(name, focus) {
  for (const one of TABS) {
    const tab = $("tab-" + one), chosen = one === name;
    tab.setAttribute("aria-selected", chosen);
    tab.tabIndex = chosen ? 0 : -1;
    $(one).hidden = !chosen;
    if (chosen && focus) tab.focus();
  }
  if (name === "kernels") showKernels();
}
TABS.forEach((name, index) => {
  const tab = $("tab-" + name);
  tab.addEventListener("click", () => choose(name));
  tab.addEventListener("keydown", event => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const to = event.key === "Home" ? 0 : event.key === "End" ? TABS.length - 1 : step ? (index + step + TABS.length) % TABS.length : -1;
    if (to >= 0) { event.preventDefault(); choose(TABS[to], true); }
  });
});

$("access").addEventListener("submit", event => {
  event.preventDefault();
  key = $("key").value;
  sessionStorage.setItem("gristmill-key", key);
  $("access").hidden = true;
  poll();
});

// Chat.
function element(name, text, kind) {
  const one = document.createElement(name);
  if (text !== undefined) one.textContent = text;
  if (kind) one.className = kind;
  return one;
}

function draw(message) {
  const item = element("li", undefined, message.role);
  item.append(element("b", message.role === "user" ? "You" : "Model"));
  if (message.reasoning) item.append(element("span", message.reasoning, "thought"));
  item.append(element("span", message.content, message.error ? "error" : undefined));
  return item;
}

function buttons() {
  const busy = running !== null;
  $("send").disabled = $("retry").disabled = $("clear").disabled = busy;
  $("stop").disabled = !busy;
  if (!busy) $("retry").disabled = $("clear").disabled = messages.length === 0;
}

function parameters() {
  const given = {};
  for (const name of ["temperature", "top_p", "max_tokens", "seed"])
    if ($(name).value !== "") given[name] = Number($(name).value);
  return given;
}

async function answer() {
  const message = { role: "assistant", content: "", reasoning: "" };
  let item = draw(message);
  $("messages").append(item);
  running = new AbortController();
  buttons();
  const begin = performance.now();
  let first = 0, usage = null;
  try {
    const system = $("system").value.trim();
    const sent = messages.filter(one => !one.error).map(({ role, content }) => ({ role, content }));
    const body = { messages: system ? [{ role: "system", content: system }, ...sent] : sent, stream: true, stream_options: { include_usage: true }, ...parameters() };
    const response = await call("v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal: running.signal });
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      rest += value;
      const events = rest.split("\n\n");
      rest = events.pop();
      for (const event of events) {
        if (!event.startsWith("data: ") || event === "data: [DONE]") continue;
        const data = JSON.parse(event.slice(6));
        if (data.error) throw new Error(data.error.message);
        usage = data.usage || usage;
        const delta = data.choices[0]?.delta;
        if (!delta) continue;
        if (!first && (delta.content || delta.reasoning_content)) first = performance.now();
        message.content += delta.content || "";
        message.reasoning += delta.reasoning_content || "";
      }
      const next = draw(message);
      item.replaceWith(next);
      item = next;
    }
    messages.push(message);
    $("announce").textContent = "Model: " + message.content;
    const seconds = (performance.now() - first) / 1000, count = usage ? usage.completion_tokens : 0;
    $("figures").textContent = `${count} tokens, first after ${Math.round(first - begin)} ms` + (count > 1 ? `, ${((count - 1) / seconds).toFixed(1)} per second` : "");
  } catch (error) {
    if (error.name === "AbortError") {
      if (message.content) messages.push(message);
    } else {
      message.error = true;
      message.content += (message.content ? "\n" : "") + error.message;
      $("announce").textContent = "Error: " + error.message;
    }
    item.replaceWith(draw(message));
  }
  running = null;
  buttons();
}

function send() {
  const text = $("text").value;
  if (!text.trim() || running) return;
  messages.push({ role: "user", content: text });
  $("messages").append(draw(messages.at(-1)));
  $("text").value = "";
  answer();
}
$("ask").addEventListener("submit", event => { event.preventDefault(); send(); });
$("text").addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", () => { messages = []; $("messages").replaceChildren(); $("figures").textContent = ""; buttons(); $("text").focus(); });
$("retry").addEventListener("click", () => {
  while (messages.length && messages.at(-1).role !== "user") messages.pop();
  if (!messages.length) return;
  $("messages").replaceChildren(...messages.map(draw));
  answer();
});

// Load.
const CHARTS = [
  ["Running requests", state => state.running, value => value],
  ["Waiting requests", state => state.waiting, value => value],
  ["KV cache in use", state => state.cache, value => (100 * value).toFixed(1) + " %"],
  ["Output tokens per second", state => state.rate, value => value.toFixed(1)],
  ["Prompt tokens per second", state => state.prompt_rate, value => value.toFixed(1)],
  ["Time to first token, mean of the last minute", state => state.first, value => value === null ? "none" : (1000 * value).toFixed(0) + " ms"],
];
for (const [title] of CHARTS) {
  const figure = element("figure");
  figure.append(element("figcaption", title), element("strong", "0"));
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 100 44");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  svg.append(document.createElementNS("http://www.w3.org/2000/svg", "polyline"));
  figure.append(svg);
  $("charts").append(figure);
  history[title] = [];
}

function rates(now) {
  // Over the last few seconds, so that a step of many tokens is no spike.
  const old = past.find(one => now.time - one.time <= 5) || now, span = now.time - old.time;
  const minute = past.find(one => now.time - one.time <= 60) || now;
  const count = now.first_token_count - minute.first_token_count;
  return {
    rate: span > 0 ? (now.generation_tokens - old.generation_tokens) / span : 0,
    prompt_rate: span > 0 ? (now.prompt_tokens - old.prompt_tokens) / span : 0,
    first: count > 0 ? (now.first_token_seconds - minute.first_token_seconds) / count : null,
  };
}
const past = [];

function show(state) {
  $("model").textContent = model = state.model;
  document.title = "gristmill: " + state.model;
  const loading = state.loading, done = loading && loading.fraction !== null ? ` ${Math.floor(100 * loading.fraction)} %` : "";
  $("state").textContent = state.state + (loading ? ` (${loading.phase}${done})` : "") + (state.uptime === undefined ? "" : `, up ${Math.round(state.uptime)} s`);
  past.push(state);
  while (past.length > KEPT) past.shift();
  const engines = state.engines.filter(one => !one.error);
  const sum = name => engines.reduce((total, one) => total + one[name], 0);
  const values = { running: sum("running"), waiting: sum("waiting"), cache: sum("num_blocks") ? sum("used_blocks") / sum("num_blocks") : 0, ...rates(state) };
  CHARTS.forEach(([title, value, text], index) => {
    const figure = $("charts").children[index], series = history[title], now = value(values);
    series.push(now ?? 0);
    while (series.length > KEPT) series.shift();
    const most = Math.max(...series, 1e-9);
    figure.querySelector("strong").textContent = text(now);
    figure.querySelector("polyline").setAttribute("points", series.map((one, at) => `${(100 * at) / Math.max(1, KEPT - 1)},${42 - (40 * one) / most}`).join(" "));
  });
  table($("engines"), [["Engine", (one, index) => index], ["State", one => one.error || one.state], ["Running", one => one.running, true], ["Waiting", one => one.waiting, true],
    ["Blocks in use", one => one.used_blocks === undefined ? "" : `${one.used_blocks} of ${one.num_blocks}`, true], ["Cached blocks", one => one.cached_blocks, true],
    ["Weights", one => bytes(one.weight_bytes), true], ["Cache", one => bytes(one.cache_bytes), true], ["Graphs", one => bytes(one.graph_bytes), true],
    ["Late kernels", one => one.late_kernels, true]], state.engines);
}

function bytes(count) { return count === undefined || count === null ? "" : count < 1e9 ? (count / 1e6).toFixed(1) + " MB" : (count / 1e9).toFixed(2) + " GB"; }

function table(where, columns, rows) {
  const head = element("tr");
  for (const [title, , number] of columns) { const cell = element("th", title, number ? "number" : ""); cell.scope = "col"; head.append(cell); }
  where.tHead.replaceChildren(head);
  where.tBodies[0].replaceChildren(...rows.map((row, index) => {
    const line = element("tr");
    for (const [, value, number] of columns) line.append(element("td", value(row, index) ?? "", number ? "number" : ""));
    return line;
  }));
}

async function showKernels() {
  try {
    const { kernels } = await (await call("ui/kernels")).json();
    table($("table"), [["Operation", one => one.op], ["Kernel", one => one.kernel], ["Weights", one => (one.formats || []).join(", ")], ["Plans", one => one.plans, true], ["Why", one => one.reason]], kernels);
  } catch (error) {
    table($("table"), [["Error", one => one]], [error.message]);
  }
}
$("refresh").addEventListener("click", showKernels);

async function poll() {
  clearTimeout(last);
  try {
    const state = await (await call("ui/state")).json();
    $("no-chat").hidden = !state.pools;
    $("ask").hidden = state.pools;
    show(state);
  }
  catch (error) { $("state").textContent = error.message; }
  last = setTimeout(poll, document.hidden ? 10000 : 1000);
}
buttons();
poll();
