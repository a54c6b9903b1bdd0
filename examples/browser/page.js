// Sends tokens at the chosen pace, plays the audio as it arrives, and draws both.
const find = (id) => document.getElementById(id);
const show = (values) => {
  for (const [id, value] of Object.entries(values)) find(id).textContent = value;
};
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`);

for (const id of ["rate", "wait"]) {
  const label = () => show({ [`${id}_shown`]: find(id).value });
  find(id).oninput = label;
  label();
}
fetch("texts").then(async (answer) => {
  const texts = await answer.json();
  find("text").value = texts[0];
  for (const text of texts.length > 1 ? texts : []) {
    const button = find("texts").appendChild(document.createElement("button"));
    button.textContent = text;
    button.onclick = () => (find("text").value = text);
  }
});
find("form").onsubmit = (event) => {
  event.preventDefault();
  speak().catch((error) => show({ state: `error: ${error.message}` }));
};

// One utterance, from its text to its last sample. Times are seconds since the first token was sent.
class Utterance {
  constructor(text, rate, wait) {
    Object.assign(this, { text, rate, wait });
    Object.assign(this, { tokens: [], sent: 0, received: 0, played: 0, loudest: 0, started: null, final: false });
    this.sampleRate = 24000; // until the first chunk has the value; the same for samplesPerToken
    this.samplesPerToken = 960;
    this.history = []; // {time, sent, received, played}
  }

  get time() {
    return this.started === null ? 0 : (performance.now() - this.started) / 1000;
  }

  // Resolves after the last sample was played.
  async run() {
    const context = new AudioContext({ sampleRate: this.sampleRate });
    const socket = new WebSocket(`ws://${location.host}/speak`);
    const leave = () => socket.close(); // a browser may keep a page, and its socket, after a person left it
    addEventListener("pagehide", leave);
    try {
      await context.audioWorklet.addModule("ring.js");
      const ring = new AudioWorkletNode(context, "ring", {
        numberOfInputs: 0,
        outputChannelCount: [1],
        processorOptions: { wait: this.wait * this.sampleRate },
      });
      this.analyser = new AnalyserNode(context);
      ring.connect(this.analyser).connect(context.destination);
      await this.play(socket, ring);
    } finally {
      removeEventListener("pagehide", leave);
      socket.close();
      await context.close();
    }
  }

  play(socket, ring) {
    socket.binaryType = "arraybuffer";
    return new Promise((resolve, reject) => {
      ring.port.onmessage = ({ data }) => {
        this.heard(data);
        if (data.done) resolve();
      };
      const begin = () => socket.send(this.text);
      socket.readyState === WebSocket.OPEN ? begin() : (socket.onopen = begin);
      socket.onclose = () => this.final || reject(new Error("the bridge is gone"));
      socket.onmessage = ({ data }) => {
        if (data instanceof ArrayBuffer) return this.arrived(new Float32Array(data), ring);
        const { error, tokens, final, sample_rate, samples_per_token } = JSON.parse(data);
        if (error) return reject(new Error(error));
        if (tokens) return this.send(socket, tokens);
        if (sample_rate !== this.sampleRate) return reject(new Error(`this page plays ${this.sampleRate} Hz only`));
        Object.assign(this, { final, samplesPerToken: samples_per_token });
      };
    });
  }

  // Sends tokens as a language model prints them.
  async send(socket, tokens) {
    this.tokens = tokens;
    this.started = performance.now();
    show({ state: "waiting for the first sound" });
    while (this.sent < tokens.length && socket.readyState === WebSocket.OPEN) {
      const due = Math.min(tokens.length, Math.floor(this.time * this.rate) + 1);
      if (due > this.sent) socket.send(tokens.slice(this.sent, due).join(" ") + " ");
      this.sent = due;
      show({ sent: `${due} / ${tokens.length}` });
      await new Promise((resolve) => setTimeout(resolve, 10));
    }
    if (socket.readyState === WebSocket.OPEN) socket.send("");
  }

  arrived(audio, ring) {
    this.received += audio.length;
    show({ received: this.received });
    ring.port.postMessage(audio, [audio.buffer]);
    if (this.final) ring.port.postMessage(null);
  }

  heard({ played, underruns }) {
    if (played && !this.played) show({ first: `${this.time.toFixed(2)} s`, state: "playing" });
    this.played = played;
    const samples = new Float32Array(this.analyser.fftSize);
    this.analyser.getFloatTimeDomainData(samples);
    this.loudest = Math.max(this.loudest, Math.sqrt(samples.reduce((sum, x) => sum + x * x, 0) / samples.length));
    const buffer = (this.received - played) / this.sampleRate;
    show({ played, underruns, buffer: `${buffer.toFixed(2)} s`, loudness: this.loudest.toFixed(3) });
    if (this.started !== null) this.history.push({ time: this.time, sent: this.sent, received: this.received, played });
  }
}

async function speak() {
  find("speak").disabled = true;
  show({ state: "reading the sentence", sent: "–", first: "–", buffer: "–", underruns: 0, received: 0, played: 0 });
  const utterance = new Utterance(find("text").value, Number(find("rate").value), Number(find("wait").value));
  const redraw = setInterval(() => draw(utterance), 100);
  try {
    await utterance.run();
    show({ state: "done" });
  } finally {
    clearInterval(redraw);
    draw(utterance);
    find("speak").disabled = false;
  }
}

// Seconds of audio over time: audio of the sent tokens, received audio, and played audio. The area between received and
// played audio is the buffer. The listener hears a gap while the buffer is empty.
function draw({ history, tokens, sampleRate, samplesPerToken, time }) {
  const canvas = find("chart");
  const pen = canvas.getContext("2d");
  const [left, right, top, bottom] = [70, canvas.width - 10, 50, canvas.height - 40];
  const audio = Math.max(1, (tokens.length * samplesPerToken) / sampleRate);
  const end = Math.max(audio, time, history.at(-1)?.time ?? 0);
  const x = (seconds) => left + ((right - left) * seconds) / end;
  const y = (samples) => bottom - ((bottom - top) * samples) / sampleRate / audio;
  pen.clearRect(0, 0, canvas.width, canvas.height);
  pen.font = "22px system-ui, sans-serif";
  pen.lineWidth = 2;
  pen.strokeStyle = colour("line");
  for (let part = 0; part <= 4; part++) {
    const height = y((audio * sampleRate * part) / 4);
    pen.beginPath();
    pen.moveTo(left, height);
    pen.lineTo(right, height);
    pen.stroke();
    pen.fillStyle = colour("soft");
    pen.textAlign = "right";
    pen.fillText(((audio * part) / 4).toFixed(1), left - 12, height + 8);
    pen.textAlign = part === 4 ? "right" : "center";
    pen.fillText(`${((end * part) / 4).toFixed(1)} s`, x((end * part) / 4), canvas.height - 8);
  }
  const line = (field, scale) => {
    pen.moveTo(x(0), y(0));
    for (const entry of history) pen.lineTo(x(entry.time), y(entry[field] * scale));
  };
  pen.fillStyle = colour("here");
  pen.beginPath();
  line("received", 1);
  for (const { time, played } of history.toReversed()) pen.lineTo(x(time), y(played));
  pen.fill();
  pen.lineWidth = 4;
  for (const [name, field, scale] of [["sent", "sent", samplesPerToken], ["heard", "played", 1]]) {
    pen.strokeStyle = colour(name);
    pen.beginPath();
    line(field, scale);
    pen.stroke();
  }
  pen.textAlign = "left";
  const legend = { sent: "seconds of speech in the tokens sent", here: "in the buffer", heard: "heard" };
  let at = left;
  for (const [name, text] of Object.entries(legend)) {
    pen.fillStyle = colour(name);
    pen.fillRect(at, 12, 20, 20);
    pen.fillStyle = colour("soft");
    pen.fillText(text, at + 30, 30);
    at += pen.measureText(text).width + 80;
  }
}

draw(new Utterance("", 0, 0)); // the empty chart
