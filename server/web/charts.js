/* Small pictures. Each says in words what it shows. */

/* A line over the last minutes, in a box of 100 x 24; `top` is the least that the box spans. */
function drawLine(svg, points, top) {
  const most = Math.max(top, ...points);
  const step = points.length > 1 ? 100 / (points.length - 1) : 0;
  const at = (value, i) => (i * step).toFixed(2) + "," + (23 - (22 * value) / most).toFixed(2);
  if (!svg.firstChild) svg.append(make("path", { class: "area" }), make("polyline", { class: "line" }));
  const line = points.length > 1 ? points.map(at).join(" ") : "";
  svg.lastChild.setAttribute("points", line);
  svg.firstChild.setAttribute("d", line ? "M0,24 L" + line.replaceAll(" ", " L") + " L100,24 Z" : "");
}

/* Columns of a histogram, with its middle and its 99th percentile marked. */
function drawHistogram(figure, title, buckets) {
  const total = totalOf(buckets);
  const most = Math.max(1, ...buckets.map((bucket) => bucket.count));
  const half = quantileOf(buckets, 0.5);
  const most99 = quantileOf(buckets, 0.99);
  const [head, columns, axis] = figure.children;
  setText(head.firstChild, title);
  setText(head.lastChild, total === 0 ? "no requests"
    : "half " + boundText(half) + ", 99% " + boundText(most99));
  columns.setAttribute("aria-label", title + ", " + plural(total, "request", "requests") +
    (total === 0 ? "" : ": " + head.lastChild.textContent));
  sync(columns, buckets, (bucket) => bucket.bound, () => make("span", {}, make("i")), (column, bucket) => {
    const bar = column.firstChild;
    bar.style.height = bucket.count === 0 ? "0" : Math.max(1.5, (100 * bucket.count) / most) + "%";
    column.title = (bucket.bound === Infinity ? "above the last bound" : "at most " + seconds(bucket.bound)) +
      ": " + plural(bucket.count, "request", "requests");
    column.classList.toggle("half", bucket.bound === half);
    column.classList.toggle("most", bucket.bound === most99);
  });
  const ticks = [0.001, 0.01, 0.1, 1, 30]; /* three columns apart */
  sync(axis, buckets, (bucket) => bucket.bound, () => make("span"), (tick, bucket) => {
    setText(tick, ticks.includes(bucket.bound) ? seconds(bucket.bound) : "");
    tick.classList.toggle("minor", bucket.bound === 0.01 || bucket.bound === 1);
  });
}

function boundText(bound) {
  return bound === Infinity ? "above 30 s" : "≤ " + seconds(bound);
}

/* How strongly a part is drawn of which that many percent were kept. A tenth must show, so it is not
 * in proportion; the ramp beside the strips is drawn by the same rule. */
function strength(keptPercent) {
  return keptPercent === 0 ? 0 : 0.12 + 0.88 * Math.pow(keptPercent / 100, 0.6);
}

/* A request's positions from first to last, and how much was kept of each part. */
function drawStrip(svg, bins) {
  const parts = bins.length;
  if (svg.children.length !== parts) {
    svg.setAttribute("viewBox", "0 0 " + parts + " 8");
    svg.replaceChildren(...bins.map((_, i) => make("rect", { x: i, y: 0, width: 1.02, height: 8 })));
  }
  bins.forEach((bin, i) => svg.children[i].setAttribute("fill-opacity", strength(bin || 0).toFixed(3)));
  svg.setAttribute("aria-label", "kept of the first tenth " + keptOf(bins, 0, 0.1) + ", of the middle " +
    keptOf(bins, 0.1, 0.9) + ", of the last tenth " + keptOf(bins, 0.9, 1));
}

function keptOf(bins, from, to) {
  const part = bins.slice(Math.round(from * bins.length), Math.round(to * bins.length)).filter((bin) => bin !== null);
  return part.length === 0 ? "nothing" : Math.round(part.reduce((a, b) => a + b, 0) / part.length) + "%";
}

function drawRamp(svg) {
  svg.replaceChildren(...Array.from({ length: 21 }, (_, i) =>
    make("rect", { x: i * 4.76, y: 0, width: 4.9, height: 8, "fill-opacity": strength(i * 5).toFixed(3) })));
  svg.setAttribute("aria-label", "pale: little was kept; full: all was kept");
}
