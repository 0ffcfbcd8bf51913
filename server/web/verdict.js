/* What to tell somebody who has just been woken. Pure. */

const RECENT_MS = 60000;

/* {state: "good" | "warn" | "bad", word, reasons: [sentence]} */
function judge(history, stats) {
  const now = history.last.values;
  const bad = [];
  const warn = [];
  const notes = [];
  const grew = (series) => history.growth(series, RECENT_MS);
  const lately = "in the last " + recentText(history);

  for (const device of stats.devices) {
    const name = "Worker " + device.worker + " (" + device.device + ")";
    if (device.given_up) bad.push(name + " ended again and again: the device is given up and tried every 10 s.");
    else if (!device.up) bad.push(name + " does not answer: another one is being started.");
    if (device.fallback) warn.push("Worker " + device.worker + ": the CPU computes in place of a GPU that cannot be had, far more slowly.");
    const restarts = grew('dropkv_worker_restarts_total{worker="' + device.worker + '",device="' + device.device + '"}');
    if (restarts > 0) warn.push(name + " was replaced " + times(restarts) + " " + lately + ".");
  }
  const ended = (outcome) => grew('dropkv_requests_total{outcome="' + outcome + '"}');
  const tell = (list, n, sentence) => n > 0 && list.push(plural(n, "request", "requests") + " " + sentence + " " + lately + ".");
  tell(bad, ended("failed"), "failed on our side");
  tell(warn, ended("busy"), "refused as busy (the queue or a share of it was full, or no device answered)");
  tell(warn, ended("timeout"), "ended because of a deadline");
  tell(warn, grew("dropkv_degraded_total"), "answered by recency instead of scores");
  tell(notes, ended("invalid"), "refused because the caller has to change them");
  const nan = grew('dropkv_nonfinite_inputs_total{action="refused"}') + grew('dropkv_nonfinite_inputs_total{action="masked"}');
  if (nan > 0) warn.push(plural(nan, "block", "blocks") + " held NaN or infinity " + lately + ".");
  if (valueOf(now, "dropkv_queue_requests") > 0.8 * valueOf(now, "dropkv_queue_limit_requests"))
    warn.push("The queue is filled above 80% of its limit.");
  if (valueOf(now, "dropkv_body_bytes") > 0.9 * valueOf(now, "dropkv_body_limit_bytes"))
    warn.push("Bodies and answers hold above 90% of the memory they may.");
  if (grew("dropkv_log_lines_lost_total") > 0) warn.push("Lines of the log could not be written " + lately + ".");

  if (stats.draining)
    return { state: "warn", word: "Shutting down", reasons: ["What was accepted is being answered; nothing new is.", ...bad, ...warn] };
  if (!stats.ready) return { state: "bad", word: "Not ready", reasons: [...bad, ...warn] };
  if (bad.length > 0) return { state: "bad", word: "Serving, with failures", reasons: [...bad, ...warn, ...notes] };
  if (warn.length > 0) return { state: "warn", word: "Serving, with something to look at", reasons: [...warn, ...notes] };
  return { state: "good", word: "Serving", reasons: [notes.length > 0 ? "Every device answers." : calm(history), ...notes] };
}

function calm(history) {
  const answered = history.growth('dropkv_requests_total{outcome="ok"}', RECENT_MS);
  const span = recentText(history);
  if (history.seconds(RECENT_MS) === 0) return "Every device answers. What happens from now on is shown below.";
  return answered === 0 ? "Every device answers. Nobody asked in the last " + span + "."
    : "Every device answers. All " + plural(answered, "request", "requests") + " of the last " + span + " got what they asked for.";
}

function times(n) {
  return n === 1 ? "once" : whole(n) + " times";
}

/* As much of a minute as this page has seen. */
function recentText(history) {
  return Math.round(history.seconds(RECENT_MS)) + " s";
}
