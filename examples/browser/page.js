// Sends tokens at their pace, plays what comes back as it comes, and draws how it came.
const SAMPLE_RATE = 24000;
const TOKEN = /<\|s_\d+\|>|\d+/g;

const find = (id) => document.getElementById(id);
const show = (numbers) => {
  for (const [id, value] of Object.entries(numbers)) find(id).textContent = value;
};

fetch("tokens").then(async (answer) => (find("tokens").value = await answer.text()));
find("speak").onclick = () => speak().catch((error) => show({ state: `error: ${error.message}` }));

async function speak() {
  find("speak").disabled = true;
  const context = new AudioContext({ sampleRate: SAMPLE_RATE });
  await context.audioWorklet.addModule("ring.js");
  const ring = new AudioWorkletNode(context, "ring", {
    numberOfInputs: 0,
    outputChannelCount: [1],
    processorOptions: { prebuffer: Number(find("buffer").value) * SAMPLE_RATE },
  });
  const analyser = new AnalyserNode(context);
  ring.connect(analyser).connect(context.destination);

  const started = performance.now();
  const seconds = () => (performance.now() - started) / 1000;
  const chunks = []; // {arrival, latency, audio}: seconds
  const levels = []; // [time, seconds of audio that wait to be played]
  let received = 0;
  let loudest = 0;
  show({ state: "waiting", played: 0, received: 0, underruns: 0, first: "-" });

  const done = new Promise((resolve, reject) => {
    ring.port.onmessage = ({ data: { played, underruns, done } }) => {
      loudest = Math.max(loudest, rms(analyser));
      levels.push([seconds(), (received - played) / SAMPLE_RATE]);
      show({ played, underruns, loudness: loudest.toFixed(4) });
      if (done) resolve();
    };
    const socket = new WebSocket(`ws://${location.host}/speak`);
    socket.binaryType = "arraybuffer";
    addEventListener("pagehide", () => socket.close()); // browsers may keep a page that was left, and its socket
    socket.onopen = () => send(socket, find("tokens").value.match(TOKEN) ?? [], Number(find("rate").value));
    socket.onmessage = ({ data }) => {
      if (typeof data === "string") {
        const numbers = JSON.parse(data);
        if (numbers.error) return reject(new Error(numbers.error));
        if (numbers.sample_rate !== SAMPLE_RATE) return reject(new Error(`this page plays ${SAMPLE_RATE} Hz only`));
        if (!chunks.length) show({ state: "playing", first: `${numbers.arrival_s.toFixed(3)} s` });
        return chunks.push({ arrival: seconds(), latency: numbers.latency_s, final: numbers.final });
      }
      const audio = new Float32Array(data);
      received += audio.length;
      chunks.at(-1).audio = audio.length / SAMPLE_RATE;
      ring.port.postMessage(audio, [audio.buffer]);
      if (chunks.at(-1).final) ring.port.postMessage(null);
      show({ received });
    };
    socket.onclose = () => chunks.at(-1)?.final || reject(new Error("the bridge is gone"));
  });

  const redraw = setInterval(() => draw(chunks, levels), 200);
  try {
    await done;
    show({ state: "done" });
  } finally {
    clearInterval(redraw);
    draw(chunks, levels);
    await context.close();
    find("speak").disabled = false;
  }
}

// As a language model would: `rate` tokens a second, or all at once where it is 0.
async function send(socket, tokens, rate) {
  const began = performance.now();
  for (let sent = 0; sent < tokens.length && socket.readyState === WebSocket.OPEN; ) {
    const due = rate ? Math.floor(((performance.now() - began) / 1000) * rate) + 1 : sent + 500;
    if (due > sent) socket.send(tokens.slice(sent, due).join(" ") + " ");
    sent = Math.max(sent, due);
    await new Promise((resolve) => setTimeout(resolve, rate ? 20 : 0));
  }
  if (socket.readyState === WebSocket.OPEN) socket.send("");
}

function rms(analyser) {
  const samples = new Float32Array(analyser.fftSize);
  analyser.getFloatTimeDomainData(samples);
  return Math.sqrt(samples.reduce((sum, sample) => sum + sample * sample, 0) / samples.length);
}

// Bars: latency of each chunk. Line: seconds of audio that wait to be played; at 0 the listener hears a gap.
function draw(chunks, levels) {
  const canvas = find("chart");
  const pen = canvas.getContext("2d");
  const { width, height } = canvas;
  const [left, bottom] = [44, height - 28];
  const end = Math.max(1, levels.at(-1)?.[0] ?? 0);
  const top = Math.max(0.5, ...chunks.map(({ latency }) => latency), ...levels.map(([, level]) => level)) * 1.1;
  const x = (time) => left + ((width - left - 10) * time) / end;
  const y = (value) => bottom - ((bottom - 24) * value) / top;
  pen.clearRect(0, 0, width, height);
  pen.font = "12px sans-serif";
  pen.fillStyle = "#556";
  pen.strokeStyle = "#dde";
  for (let part = 0; part <= 4; part++) {
    const value = (top * part) / 4;
    pen.strokeRect(left, y(value), width - left - 10, 0);
    pen.fillText(value.toFixed(2), 8, y(value) + 4);
    pen.fillText(`${((end * part) / 4).toFixed(1)} s`, x((end * part) / 4) - (part ? 24 : 0), height - 10);
  }
  pen.fillStyle = "#d9822b";
  for (const { arrival, latency } of chunks) pen.fillRect(x(arrival) - 4, y(latency), 8, bottom - y(latency));
  pen.fillText("latency of a chunk, s", left + 6, 14);
  pen.fillStyle = pen.strokeStyle = "#2b6cb0";
  pen.fillText("audio waiting to be played, s", left + 150, 14);
  pen.lineWidth = 2;
  pen.beginPath();
  for (const [time, level] of levels) pen.lineTo(x(time), y(level));
  pen.stroke();
}
