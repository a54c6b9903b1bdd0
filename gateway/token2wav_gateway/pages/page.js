// Sends a text to the gateway, plays the audio as it arrives, and shows the words while they are heard.
const RATE = 24000;
const find = (id) => document.getElementById(id);
const show = (values) => {
  for (const [id, value] of Object.entries(values)) find(id).textContent = value;
};
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`);

function headers(more = {}) {
  const key = find("key").value.trim();
  return key ? { ...more, authorization: `Bearer ${key}` } : more;
}

async function checked(answer) {
  if (answer.ok) return answer;
  const { error } = await answer.json().catch(() => ({ error: { message: `status ${answer.status}` } }));
  throw new Error(error.message);
}

async function listVoices() {
  const answer = await fetch("v1/audio/voices", { headers: headers() });
  find("keys").hidden = answer.status !== 401 && !find("key").value;
  const { voices } = await (await checked(answer)).json();
  find("voice").replaceChildren(...["default", ...voices].map((name) => new Option(name)));
}

const report = (error) => show({ state: `error: ${error.message}` });
find("key").onchange = () => listVoices().catch(report);
listVoices().catch(report);
find("form").onsubmit = (event) => {
  event.preventDefault();
  speak().catch(report);
};

// One text, from its request to its last sample. Times are seconds since the request.
class Speech {
  constructor() {
    Object.assign(this, { received: 0, played: 0, loudest: 0, history: [], spans: [], started: performance.now() });
    this.leaving = new AbortController();
  }

  get time() {
    return (performance.now() - this.started) / 1000;
  }

  // Resolves after the last sample was played.
  async run(body) {
    const context = new AudioContext({ sampleRate: RATE });
    const leave = () => this.leaving.abort(); // a browser may keep a page after a person left it
    addEventListener("pagehide", leave);
    try {
      await context.audioWorklet.addModule("ring.js");
      const ring = new AudioWorkletNode(context, "ring", {
        numberOfInputs: 0,
        outputChannelCount: [1],
        processorOptions: { wait: 0.1 * RATE },
      });
      this.analyser = new AnalyserNode(context);
      ring.connect(this.analyser).connect(context.destination);
      const played = new Promise((resolve) => {
        ring.port.onmessage = ({ data }) => {
          this.heard(data);
          if (data.done) resolve();
        };
      });
      await this.receive(body, ring);
      await played;
    } finally {
      removeEventListener("pagehide", leave);
      leave();
      await context.close();
    }
  }

  async receive(body, ring) {
    this.started = performance.now();
    const answer = await checked(
      await fetch("v1/audio/speech", {
        method: "POST",
        headers: headers({ "content-type": "application/json" }),
        body: JSON.stringify(body),
        signal: this.leaving.signal,
      }),
    );
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (let piece = await reader.read(); !piece.done; piece = await reader.read()) {
      const events = (rest + piece.value).split("\n\n");
      rest = events.pop();
      for (const event of events) this.take(JSON.parse(event.slice(event.indexOf("data: ") + 6)), ring);
    }
    ring.port.postMessage(null);
  }

  take({ type, audio, timestamps, error, end_reason }, ring) {
    if (type === "speech.audio.error") throw new Error(error.message);
    if (end_reason) show({ state: `cut off: ${end_reason}` });
    if (timestamps) this.place(timestamps);
    if (!audio) return;
    const bytes = Uint8Array.from(atob(audio), (letter) => letter.charCodeAt(0));
    const samples = Float32Array.from(new Int16Array(bytes.buffer), (sample) => sample / 32768);
    this.received += samples.length;
    show({ received: this.received });
    ring.port.postMessage(samples, [samples.buffer]);
  }

  // Shows further words, which have their times a little after their audio.
  place(timestamps) {
    const further = timestamps.map(({ word, start_ms, end_ms }) => {
      const span = document.createElement("span");
      Object.assign(span, { textContent: word, title: `${start_ms} to ${end_ms} ms` });
      return { span, start: (start_ms / 1000) * RATE };
    });
    this.spans.push(...further);
    find("words").replaceChildren(...this.spans.flatMap(({ span }) => [span, " "]));
  }

  heard({ played, underruns }) {
    if (played && !this.played) show({ first: `${this.time.toFixed(2)} s`, state: "playing" });
    this.played = played;
    for (const { span, start } of this.spans) span.className = start < played ? "heard" : "";
    const samples = new Float32Array(this.analyser.fftSize);
    this.analyser.getFloatTimeDomainData(samples);
    this.loudest = Math.max(this.loudest, Math.sqrt(samples.reduce((sum, x) => sum + x * x, 0) / samples.length));
    const buffer = (this.received - played) / RATE;
    show({ played, underruns, buffer: `${buffer.toFixed(2)} s`, loudness: this.loudest.toFixed(3) });
    this.history.push({ time: this.time, received: this.received, played });
  }
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result.replace(/^data:[^;,]*/, "data:audio/wav"));
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

async function speak() {
  find("speak").disabled = true;
  show({ state: "waiting for the first sound", first: "–", buffer: "–", underruns: 0, received: 0, played: 0, words: "" });
  const speech = new Speech();
  const redraw = setInterval(() => draw(speech), 100);
  try {
    const body = { input: find("text").value, response_format: "pcm", stream_format: "sse", word_timestamps: true };
    body.speed = Number(find("speed").value);
    const [recording] = find("recording").files;
    if (recording) Object.assign(body, { ref_audio: await dataUrl(recording), ref_text: find("ref_text").value });
    else body.voice = find("voice").value;
    await speech.run(body);
    if (!find("state").textContent.startsWith("cut off")) show({ state: "done" });
  } finally {
    clearInterval(redraw);
    draw(speech);
    find("speak").disabled = false;
  }
}

// Seconds of audio over time: received and played. The area between them is the buffer. The listener hears a gap while
// the buffer is empty.
function draw({ history, received, time }) {
  const canvas = find("chart");
  const pen = canvas.getContext("2d");
  const [left, right, top, bottom] = [70, canvas.width - 10, 50, canvas.height - 40];
  const audio = Math.max(1, received / RATE);
  const end = Math.max(audio, history.at(-1)?.time ?? 0);
  const x = (seconds) => left + ((right - left) * seconds) / end;
  const y = (samples) => bottom - ((bottom - top) * samples) / RATE / audio;
  pen.clearRect(0, 0, canvas.width, canvas.height);
  pen.font = "22px system-ui, sans-serif";
  pen.lineWidth = 2;
  pen.strokeStyle = colour("line");
  for (let part = 0; part <= 4; part++) {
    const height = y((audio * RATE * part) / 4);
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
  pen.fillStyle = colour("here");
  pen.beginPath();
  pen.moveTo(x(0), y(0));
  for (const entry of history) pen.lineTo(x(entry.time), y(entry.received));
  for (const entry of history.toReversed()) pen.lineTo(x(entry.time), y(entry.played));
  pen.fill();
  pen.lineWidth = 4;
  pen.strokeStyle = colour("heard");
  pen.beginPath();
  pen.moveTo(x(0), y(0));
  for (const entry of history) pen.lineTo(x(entry.time), y(entry.played));
  pen.stroke();
  pen.textAlign = "left";
  let at = left;
  for (const [name, text] of Object.entries({ here: "seconds of speech in the buffer", heard: "heard" })) {
    pen.fillStyle = colour(name);
    pen.fillRect(at, 12, 20, 20);
    pen.fillStyle = colour("soft");
    pen.fillText(text, at + 30, 30);
    at += pen.measureText(text).width + 80;
  }
}

draw(new Speech()); // the empty chart
