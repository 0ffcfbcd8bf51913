/* The page: asks every PERIOD_MS while it is in view, and shows what came. */

const PERIOD_MS = 2000;
const PATIENCE_MS = 5000;
const HISTORY_MS = 300000;

const history = new History(HISTORY_MS);
let stats = null;
let paused = false;
let timer = 0;
let turn = 0;
let answeredAt = 0; /* by performance.now() */
let answeredTime = ""; /* the same by the clock on the wall */

/* ---- figures at a glance ---- */

const REQUEST = 'dropkv_requests_total{outcome="ok"}';

function busyOf(now, before) {
  const seconds = (now.at - before.at) / 1000;
  let busy = 0;
  let workers = 0;
  for (const [series, value] of now.values)
    if (series.startsWith("dropkv_worker_busy_seconds_total{")) {
      busy += value - valueOf(before.values, series);
      workers++;
    }
  return workers > 0 && seconds > 0 ? Math.min(1, Math.max(0, busy / seconds / workers)) : 0;
}

function refusedOf(values) {
  return ["busy", "timeout", "failed", "draining"].reduce((n, o) => n + valueOf(values, 'dropkv_requests_total{outcome="' + o + '"}'), 0);
}

function latencyText(share) {
  const recent = histogramOf(history.last.values, "dropkv_request_seconds", history.before(RECENT_MS).values);
  const bound = quantileOf(recent, share);
  return bound === null ? "–" : bound === Infinity ? "> 30 s" : "≤ " + seconds(bound);
}

const tiles = [
  {
    name: "Answered per second",
    figure: () => ({ text: short(history.rate(REQUEST, RECENT_MS)) }),
    note: () => whole(valueOf(history.last.values, REQUEST)) + " since start",
    points: () => history.points((now, before) => (1000 * (valueOf(now.values, REQUEST) - valueOf(before.values, REQUEST))) / (now.at - before.at)),
    top: 1,
  },
  {
    name: "99% of requests took",
    figure: () => ({ text: latencyText(0.99) }),
    note: () => "half took " + latencyText(0.5),
    points: () => history.points((now, before) => {
      const bound = quantileOf(histogramOf(now.values, "dropkv_request_seconds", before.values), 0.99);
      return bound === null ? 0 : Math.min(bound, 30);
    }),
    top: 0.001,
  },
  {
    name: "Waiting",
    figure: (values) => ({ series: "dropkv_queue_depth", value: valueOf(values, "dropkv_queue_depth"), text: whole(valueOf(values, "dropkv_queue_depth")) }),
    note: () => {
      const oldest = Math.max(0, ...stats.queue.levels.map((level) => level.oldest_us));
      return whole(stats.queue.running) + " running" + (oldest > 0 ? ", oldest " + seconds(oldest * 1e-6) : "");
    },
    points: () => history.readings.map((reading) => valueOf(reading.values, "dropkv_queue_depth")),
    top: 4,
  },
  {
    name: "Devices in use",
    figure: () => ({ text: percent(busyOf(history.last, history.before(RECENT_MS))) }),
    note: () => whole(stats.devices.filter((device) => device.up).length) + " of " + whole(stats.devices.length) + " answer",
    points: () => history.points(busyOf),
    top: 1,
  },
  {
    name: "Refused or failed",
    figure: () => ({ text: whole(refusedOf(history.last.values) - refusedOf(history.before(RECENT_MS).values)) }),
    note: (values) => whole(refusedOf(values)) + " since start",
    points: () => history.points((now, before) => refusedOf(now.values) - refusedOf(before.values)),
    top: 1,
    alarm: true,
  },
  {
    name: "Tokens kept",
    figure: () => {
      const seen = history.growth("dropkv_tokens_in_total", RECENT_MS);
      return { text: seen > 0 ? percent(history.growth("dropkv_tokens_kept_total", RECENT_MS) / seen) : "–" };
    },
    note: (values) => compact(history.rate("dropkv_tokens_in_total", RECENT_MS)) + " seen a second, " +
      compact(valueOf(values, "dropkv_tokens_in_total")) + " in all",
    points: () => history.points((now, before) => (1000 * (valueOf(now.values, "dropkv_tokens_in_total") - valueOf(before.values, "dropkv_tokens_in_total"))) / (now.at - before.at)),
    top: 1,
  },
];

function showTiles() {
  const values = history.last.values;
  sync(byId("tiles"), tiles, (tile) => tile.name, (tile) => make("div", {},
    make("dt", {}, tile.name), make("dd", { class: "figure" }), make("dd", { class: "note" }),
    make("svg", { viewBox: "0 0 100 24", preserveAspectRatio: "none", "aria-hidden": "true" })),
  (box, tile) => {
    const figure = tile.figure(values);
    setFigure(box.children[1], figure.series, figure.value, figure.text);
    setText(box.children[2], tile.note(values));
    drawLine(box.children[3], tile.points(), tile.top);
    box.classList.toggle("alarm", Boolean(tile.alarm) && figure.text !== "0");
  });
}

/* ---- sections ---- */

const HISTOGRAMS = [["Total", "dropkv_request_seconds"], ["Queue", "dropkv_queue_seconds"], ["Device", "dropkv_compute_seconds"]];

function showLatency() {
  const recent = document.querySelector('input[name="span"]:checked').value === "recent";
  const since = recent ? history.before(RECENT_MS).values : null;
  const all = HISTOGRAMS.map(([title, family]) => ({ title, buckets: histogramOf(history.last.values, family, since) }));
  sync(byId("histograms"), all, (one) => one.title, () => make("figure", {},
    make("figcaption", {}, make("strong"), make("span")), make("div", { class: "columns", role: "img" }), make("div", { class: "axis", "aria-hidden": "true" })),
  (figure, one) => drawHistogram(figure, one.title, one.buckets));
  const body = byId("latency-table").tBodies[0];
  sync(body, all[0].buckets.map((bucket, i) => ({ bound: bucket.bound, counts: all.map((one) => one.buckets[i].count) })),
    (line) => line.bound, () => makeRow(4), (row, line) => {
      setText(row.cells[0], line.bound === Infinity ? "more" : seconds(line.bound));
      line.counts.forEach((count, i) => setText(row.cells[i + 1], whole(count)));
    });
  const text = "Last " + recentText(history);
  setText(byId("recent-label"), text);
  document.querySelectorAll(".recent").forEach((element) => setText(element, text));
}

function showQueue() {
  const values = history.last.values;
  const meters = [
    { name: "Requests accepted", series: "dropkv_queue_requests", limit: "dropkv_queue_limit_requests", text: whole },
    { name: "Bodies and answers held", series: "dropkv_body_bytes", limit: "dropkv_body_limit_bytes", text: bytes },
  ];
  sync(byId("meters"), meters, (meter) => meter.series, (meter) => make("div", { class: "meter" },
    make("span", {}, meter.name), make("span", {}, make("b"), " of ", make("b")),
    make("div", { class: "track", "aria-hidden": "true" }, make("i"))),
  (box, meter) => {
    const value = valueOf(values, meter.series);
    const limit = valueOf(values, meter.limit);
    const [now, most] = box.children[1].querySelectorAll("b");
    setFigure(now, meter.series, value, meter.text(value));
    setFigure(most, meter.limit, limit, meter.text(limit));
    box.lastChild.firstChild.style.width = limit > 0 ? Math.min(100, (100 * value) / limit) + "%" : "0";
    box.classList.toggle("full", value > 0.8 * limit);
  });
  sync(byId("levels").tBodies[0], stats.queue.levels, (level) => level.priority, () => makeRow(4), (row, level) => {
    const series = (family) => family + '{priority="' + level.priority + '"}';
    const waiting = valueOf(values, series("dropkv_queue_waiting"));
    const waitingBytes = valueOf(values, series("dropkv_queue_waiting_bytes"));
    setText(row.cells[0], level.priority + (level.priority === 1 ? " (first)" : ""));
    setFigure(row.cells[1], series("dropkv_queue_waiting"), waiting, whole(waiting));
    setFigure(row.cells[2], series("dropkv_queue_waiting_bytes"), waitingBytes, bytes(waitingBytes));
    setText(row.cells[3], waiting > 0 ? seconds(valueOf(values, series("dropkv_queue_age_seconds"))) : "–");
  });
}

function deviceState(device) {
  if (device.given_up) return ["bad", "given up"];
  if (!device.up) return ["bad", "down"];
  return device.fallback ? ["warn", "CPU in its place"] : ["good", "up"];
}

function showDevices() {
  const values = history.last.values;
  const before = history.before(RECENT_MS);
  const rows = [
    ["In use", (device, at) => ({ text: percent(rateOf(at("dropkv_worker_busy_seconds_total"))) })],
    ["Batches in flight", (device, at) => counted(at("dropkv_worker_batches_in_flight"), whole)],
    ["Blocks scored", (device, at) => counted(at("dropkv_worker_blocks_total"), whole)],
    ["Workers replaced", (device, at) => counted(at("dropkv_worker_restarts_total"), whole)],
    ["Scratch", (device, at) => counted(at("dropkv_worker_scratch_bytes"), bytes)],
    ["Memory of its process", (device, at) => counted(at("dropkv_worker_resident_memory_bytes"), bytes)],
    ["Clients' memory mapped", (device, at) => counted(at("dropkv_worker_mapped_bytes"), bytes)],
    ["Process", (device) => ({ text: device.pid > 0 ? String(device.pid) : "none" })],
  ];
  const counted = (series, text) => ({ series, value: valueOf(values, series), text: text(valueOf(values, series)) });
  const rateOf = (series) => {
    const span = (history.last.at - before.at) / 1000;
    return span > 0 ? Math.min(1, (valueOf(values, series) - valueOf(before.values, series)) / span) : 0;
  };
  sync(byId("devices"), stats.devices, (device) => device.worker, () => {
    const box = make("article", {}, make("h3", {}, make("span"), make("span", { class: "state" })), make("p"), make("dl", { class: "facts" }));
    for (const [name] of rows) box.lastChild.append(make("div", {}, make("dt", {}, name), make("dd")));
    return box;
  }, (box, device) => {
    const at = (family) => family + '{worker="' + device.worker + '",device="' + device.device + '"}';
    const [state, word] = deviceState(device);
    const [name, badge] = box.firstChild.children;
    setText(name, device.device);
    setText(badge, word);
    box.dataset.state = state;
    setText(box.children[1], device.backend + " on " + device.description);
    rows.forEach(([, figureOf], i) => {
      const figure = figureOf(device, at);
      setFigure(box.lastChild.children[i].lastChild, figure.series, figure.value, figure.text);
    });
  });
}

const OUTCOMES = {
  ok: "answered",
  invalid: "the caller has to change it",
  busy: "full, over its share, or no device",
  timeout: "its deadline passed",
  cancelled: "the caller went away",
  draining: "shutting down",
  failed: "our side",
};

function showOutcomes() {
  const values = history.last.values;
  sync(byId("outcomes").tBodies[0], labelsOf(values, "dropkv_requests_total", "outcome"), (outcome) => outcome, () => makeRow(3), (row, outcome) => {
    const series = 'dropkv_requests_total{outcome="' + outcome + '"}';
    const recent = history.growth(series, RECENT_MS);
    if (!row.cells[0].firstChild) row.cells[0].append(make("b"), make("small"));
    setText(row.cells[0].firstChild, outcome);
    setText(row.cells[0].lastChild, OUTCOMES[outcome] || "");
    setText(row.cells[1], whole(recent));
    setFigure(row.cells[2], series, valueOf(values, series), whole(valueOf(values, series)));
    row.dataset.state = recent > 0 && outcome !== "ok" ? (outcome === "failed" ? "bad" : "warn") : "";
  });
}

function showFacts() {
  const values = history.last.values;
  const facts = [
    ["HTTP connections", 'dropkv_connections{transport="http"}', whole],
    ["Socket connections", 'dropkv_connections{transport="socket"}', whole],
    ["Clients sharing", "dropkv_clients", whole],
    ["Regions lent, mapped", 'dropkv_regions{kind="sealed"}', whole],
    ["Their bytes", 'dropkv_region_bytes{kind="sealed"}', bytes],
    ["Regions lent, copied", 'dropkv_regions{kind="loose"}', whole],
    ["Regions lent, GPU", 'dropkv_regions{kind="device"}', whole],
    ["Released after a disconnect", 'dropkv_regions_released_total{reason="disconnect"}', whole],
    ["Received over HTTP", 'dropkv_bytes_in_total{transport="http"}', bytes],
    ["Received over the socket", 'dropkv_bytes_in_total{transport="socket"}', bytes],
    ["Read in shared memory", 'dropkv_bytes_in_total{transport="shared"}', bytes],
    ["Read in GPU memory", 'dropkv_bytes_in_total{transport="device"}', bytes],
    ["NaN or infinity refused", 'dropkv_nonfinite_inputs_total{action="refused"}', whole],
    ["Memory of this process", "process_resident_memory_bytes", bytes],
    ["File descriptors", "process_open_fds", whole],
    ["Log lines held back", "dropkv_log_lines_held_back_total", whole],
  ];
  sync(byId("facts"), facts, (fact) => fact[1], (fact) => make("div", {}, make("dt", {}, fact[0]), make("dd")), (box, fact) => {
    const value = valueOf(values, fact[1]);
    setFigure(box.lastChild, fact[1], value, fact[2](value));
  });
}

const STREAM_LABELS = ["", "", "Answered", "Not answered", "Tokens in", "Kept", "Last heard", "Queue, device, total:", ""];

function showStreams() {
  const { known, heaviest, forgotten } = stats.streams;
  const table = byId("streams");
  table.classList.toggle("with-strips", stats.keep_sets);
  table.hidden = heaviest.length === 0;
  byId("streams-empty").hidden = heaviest.length > 0;
  setText(byId("streams-note"), heaviest.length === 0 ? "" :
    (known > heaviest.length ? "the " + heaviest.length + " that read most lately, of " + whole(known) : plural(known, "stream", "streams")) +
    (forgotten > 0 ? "; " + whole(forgotten) + " quiet ones forgotten" : "") +
    (stats.keep_sets ? "" : "; --show-keep-sets would show where kept tokens lie"));
  sync(table.tBodies[0], heaviest, (stream) => stream.client + " " + stream.stream, () => {
    const row = makeRow(9);
    /* Said again, since narrow pages do not lay the table out as one. */
    row.setAttribute("role", "row");
    [...row.cells].forEach((cell, i) => {
      cell.setAttribute("role", i === 0 ? "rowheader" : "cell");
      if (STREAM_LABELS[i]) cell.dataset.label = STREAM_LABELS[i];
    });
    row.cells[0].append(make("b"), make("small"));
    row.cells[1].append(make("span", { class: "share" }, make("i")), make("span"));
    row.cells[8].append(make("svg", { class: "strip", role: "img", preserveAspectRatio: "none" }), make("small"));
    return row;
  }, (row, stream) => {
    const cells = row.cells;
    const last = stream.last;
    setText(cells[0].firstChild, stream.stream === "" ? "(no name)" : stream.stream);
    setText(cells[0].lastChild, stream.client);
    cells[1].firstChild.firstChild.style.width = 100 * stream.share + "%";
    setText(cells[1].lastChild, percent(stream.share));
    setText(cells[2], whole(stream.answered));
    setText(cells[3], whole(stream.failed));
    cells[3].dataset.state = stream.failed > 0 ? "warn" : "";
    setText(cells[4], whole(stream.tokens_in));
    setText(cells[5], stream.tokens_in > 0 ? percent(stream.tokens_kept / stream.tokens_in) : "–");
    setText(cells[6], stream.quiet_ms < 2000 ? "now" : seconds(Math.round(stream.quiet_ms / 1000)) + " ago");
    setText(cells[7], last ? [last.queue_us, last.device_us, last.total_us].map((us) => seconds(us * 1e-6)).join(", ") + (last.degraded ? ", by recency" : "") : "–");
    const strip = cells[8].firstChild;
    strip.classList.toggle("none", !stream.keep_set);
    if (stream.keep_set) drawStrip(strip, stream.keep_set);
    setText(cells[8].lastChild, stream.keep_set ? whole(last.tokens) + " tokens, " + plural(last.blocks, "block", "blocks") : "–");
  });
}

function showHead() {
  const info = labelsOf(history.last.values, "dropkv_backend_info", "backend")[0] || "";
  setText(byId("where"), location.host + " · " + stats.version + " · " + info + " · up " + seconds(Math.max(1, Math.floor(stats.uptime_s))));
  document.title = byId("verdict-word").textContent + " – dropkvd " + location.host;
}

function showVerdict(verdict) {
  byId("verdict").dataset.state = verdict.state;
  setText(byId("verdict-word"), verdict.word);
  sync(byId("reasons"), verdict.reasons, (reason) => reason, (reason) => make("li", {}, reason), () => {});
}

function show() {
  showVerdict(judge(history, stats));
  showHead();
  showTiles();
  showLatency();
  showQueue();
  showDevices();
  showOutcomes();
  showFacts();
  showStreams();
}

/* ---- asking ---- */

/* Without the name and token that the page's own address may hold: fetch() takes no such address. */
const HERE = location.origin + location.pathname;

async function ask(path, signal) {
  const reply = await fetch(new URL(path, HERE), { cache: "no-store", signal });
  if (reply.ok) return reply;
  throw new Error(reply.status === 401 ? "It wants a token (401): reload this page to sign in."
    : "It answered " + reply.status + " to " + path + ".");
}

async function update() {
  const patience = new AbortController();
  const limit = setTimeout(() => patience.abort(), PATIENCE_MS);
  try {
    const [text, json] = await Promise.all([
      ask("metrics", patience.signal).then((reply) => reply.text()),
      ask("v2/models/dropkv/stats", patience.signal).then((reply) => reply.json()),
    ]);
    take(parseMetrics(text), json.model_stats[0].dropkv);
  } catch (error) {
    lose(error);
  } finally {
    clearTimeout(limit);
  }
}

function take(values, newStats) {
  const start = "process_start_time_seconds";
  const restarted = history.last && Math.abs(valueOf(history.last.values, start) - valueOf(values, start)) > 1;
  if (restarted) history.clear();
  answeredAt = performance.now();
  history.add(answeredAt, values);
  stats = newStats;
  document.body.classList.remove("stale");
  document.documentElement.dataset.readings = String(history.readings.length);
  show();
  answeredTime = new Date().toLocaleTimeString("en-GB");
  showWhen();
}

/* A page that stands still must not pass for one that is up to date. */
function showWhen() {
  if (answeredTime !== "") setText(byId("when"), (paused ? "paused, as of " : "as of ") + answeredTime);
}

/* The figures stay, marked as old: they are the last that is known. */
function lose(error) {
  const why = error.name === "AbortError" ? "It did not answer within 5 s."
    : error instanceof TypeError ? "It cannot be reached." : error.message;
  document.body.classList.add("stale");
  showVerdict({
    state: answeredAt === 0 ? "unknown" : "bad",
    word: "No answer from the daemon",
    reasons: [why, answeredAt === 0 ? "Nothing is known of it yet." : "What stands below is " + seconds(Math.round((performance.now() - answeredAt) / 1000)) + " old."],
  });
  document.title = "No answer – dropkvd " + location.host;
}

/* Each call begins a new turn; one that was overtaken while it waited for its answer ends there. */
async function loop() {
  const mine = ++turn;
  clearTimeout(timer);
  if (paused || document.hidden) return;
  await update();
  if (mine === turn) timer = setTimeout(loop, PERIOD_MS);
}

byId("pause").addEventListener("click", () => {
  paused = !paused;
  byId("pause").setAttribute("aria-pressed", String(paused));
  setText(byId("pause"), paused ? "Go on" : "Pause");
  document.body.classList.toggle("paused", paused);
  showWhen();
  loop();
});
document.addEventListener("visibilitychange", loop);
document.querySelectorAll('input[name="span"]').forEach((input) => input.addEventListener("change", () => stats && showLatency()));
drawRamp(byId("ramp"));
loop();
