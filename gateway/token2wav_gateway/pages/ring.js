// Runs in the audio thread: samples wait here in a ring until they are played.
class Ring extends AudioWorkletProcessor {
  constructor({ processorOptions }) {
    super();
    this.wait = processorOptions.wait; // number of samples that are collected before playback begins
    this.waited = 0;
    this.samples = new Float32Array(1 << 17);
    this.read = 0; // counted from the first sample on, as are the two below
    this.written = 0;
    this.underruns = 0;
    this.playing = false;
    this.ended = false; // no more samples will come
    this.port.onmessage = ({ data }) => (data === null ? (this.ended = true) : this.push(data));
  }

  push(chunk) {
    while (this.written - this.read + chunk.length > this.samples.length) this.grow();
    for (const sample of chunk) this.samples[this.written++ % this.samples.length] = sample;
  }

  grow() {
    const larger = new Float32Array(2 * this.samples.length);
    for (let at = this.read; at < this.written; at++) {
      larger[at % larger.length] = this.samples[at % this.samples.length];
    }
    this.samples = larger;
  }

  process(_inputs, [[out]]) {
    const waiting = this.written - this.read;
    if (!this.playing && waiting > 0) {
      this.playing = this.waited >= this.wait || this.ended;
      this.waited += out.length;
    }
    if (this.playing) {
      const count = Math.min(out.length, waiting);
      for (let at = 0; at < count; at++) out[at] = this.samples[this.read++ % this.samples.length];
      if (count < out.length) {
        this.playing = false;
        this.waited = 0;
        if (!this.ended) this.underruns++;
      }
    }
    const done = this.ended && this.read === this.written;
    this.port.postMessage({ played: this.read, underruns: this.underruns, done });
    return !done;
  }
}
registerProcessor("ring", Ring);
