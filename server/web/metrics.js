/* What /metrics says, and what changed between two readings of it. Pure. */

/* {series with labels: value}, as a Map. */
function parseMetrics(text) {
  const values = new Map();
  for (const line of text.split("\n")) {
    if (line === "" || line[0] === "#") continue;
    const at = line.lastIndexOf(" ");
    values.set(line.slice(0, at), Number(line.slice(at + 1)));
  }
  return values;
}

function valueOf(values, series) {
  const value = values.get(series);
  return value === undefined ? 0 : value;
}

/* The values of one label, in the order in which they stand. */
function labelsOf(values, family, label) {
  const found = [];
  const pattern = new RegExp("^" + family + "\\{.*?\\b" + label + '="([^"]*)"');
  for (const series of values.keys()) {
    const match = pattern.exec(series);
    if (match && !found.includes(match[1])) found.push(match[1]);
  }
  return found;
}

/* Readings of the last minutes, oldest first: {at (ms), values}. */
class History {
  constructor(keepMs) {
    this.keepMs = keepMs;
    this.readings = [];
  }

  add(at, values) {
    this.readings.push({ at, values });
    while (this.readings.length > 2 && this.readings[1].at < at - this.keepMs) this.readings.shift();
  }

  clear() {
    this.readings = [];
  }

  get last() {
    return this.readings[this.readings.length - 1];
  }

  /* The youngest reading that is at least `ms` older than the last one, else the oldest there is. */
  before(ms) {
    const limit = this.last.at - ms;
    let found = this.readings[0];
    for (const reading of this.readings) {
      if (reading.at > limit) break;
      found = reading;
    }
    return found;
  }

  seconds(ms) {
    return (this.last.at - this.before(ms).at) / 1000;
  }

  growth(series, ms) {
    return valueOf(this.last.values, series) - valueOf(this.before(ms).values, series);
  }

  /* Per second, over the time there is. */
  rate(series, ms) {
    const seconds = this.seconds(ms);
    return seconds > 0 ? this.growth(series, ms) / seconds : 0;
  }

  /* [value per reading], by a function of (this reading, the one before). */
  points(measure) {
    const points = [];
    for (let i = 1; i < this.readings.length; i++) points.push(measure(this.readings[i], this.readings[i - 1]));
    return points;
  }
}

/* [{bound, count}] per bucket, not cumulative; the last bound is Infinity. `since` is an earlier
 * reading to subtract, or null. */
function histogramOf(values, family, since) {
  const buckets = [];
  let below = 0;
  for (const [series, value] of values) {
    if (!series.startsWith(family + '_bucket{le="')) continue;
    const text = series.slice(family.length + 12, -2);
    const cumulative = value - (since ? valueOf(since, series) : 0);
    buckets.push({ bound: text === "+Inf" ? Infinity : Number(text), count: cumulative - below });
    below = cumulative;
  }
  return buckets;
}

function totalOf(buckets) {
  return buckets.reduce((sum, bucket) => sum + bucket.count, 0);
}

/* The bound that a share of all values does not exceed, or null if there are none. */
function quantileOf(buckets, share) {
  const total = totalOf(buckets);
  let below = 0;
  if (total === 0) return null;
  for (const bucket of buckets) {
    below += bucket.count;
    if (below >= share * total) return bucket.bound;
  }
  return Infinity;
}
