#include "front.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string_view>
#include <utility>

namespace token2wav {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr size_t MOST_UNSENT = 64 << 20;
constexpr uint8_t SEQUENCE_START = 1;
constexpr size_t LARGEST_IDLE_STORAGE = 1 << 20;
constexpr size_t SENT_AT_ONCE = 64 << 10;
constexpr milliseconds BETWEEN_CONNECTIONS(100);
constexpr milliseconds BETWEEN_CANCELLATION_CHECKS(50);

const char* const ENGINE_STARTING =
    "engine: it is starting; send the utterance again in some seconds";
const char* const ENGINE_ENDED =
    "engine: its process has ended; send the utterance again";
const char* const ENGINE_SLOW = "engine: it does not read fast enough; send the utterance again";
const char* const SHUTTING_DOWN = "server: it is shutting down; try another one";

// Returns whether a request belongs to a sequence, and is not the first one of it.
bool is_further(const Request& request) {
    const SequenceId& id = request.sequence;
    bool of_sequence = id.text ? !id.text->empty() : id.number != 0;
    return of_sequence && (request.flags & SEQUENCE_START) == 0;
}

// Returns false if the connection has ended.
bool send_all(int socket, std::string_view bytes) {
    while (!bytes.empty()) {
        ssize_t count = ::send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL);
        if (count >= 0) {
            bytes.remove_prefix(static_cast<size_t>(count));
        } else if (errno != EINTR) {
            return false;
        }
    }
    return true;
}

}  // namespace

Outgoing outgoing_request(const Request& request) {
    uint64_t length = request_length(request);
    if (length > LARGEST_FRAME) {
        throw Refusal(
            TRITONSERVER_ERROR_INVALID_ARG, "request: " + std::to_string(length) +
                                                " bytes; at most " +
                                                std::to_string(LARGEST_FRAME) + " are allowed");
    }
    return {request.slot, request_frame(request), is_further(request)};
}

Front::Front(const std::string& socket_path) : socket_path_(socket_path) {
    if (socket_path.size() >= sizeof sockaddr_un{}.sun_path) {
        throw Refusal(
            TRITONSERVER_ERROR_INVALID_ARG,
            "engine: the path of its socket is too long: " + socket_path);
    }
    reader_ = std::thread([this] { run(); });
}

Front::~Front() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stopping_ = true;
        // The reader wakes up, and ends the connection.
        if (socket_ >= 0) ::shutdown(socket_, SHUT_RDWR);
    }
    changed_.notify_all();
    reader_.join();
}

void Front::wait_until_ready(std::chrono::seconds patience) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_for(lock, patience, [this] { return ready_ || !wrong_version_.empty(); });
    if (ready_) return;
    throw Refusal(
        TRITONSERVER_ERROR_UNAVAILABLE,
        !wrong_version_.empty() ? wrong_version_
                                : "engine: the process of the model was not ready within " +
                                      std::to_string(patience.count()) + " s at " + socket_path_);
}

void Front::submit(const Outgoing& request, Reply& reply) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!ready_) {
        // A further request of a sequence is for an utterance of the engine that has ended. It may
        // come before `fail_all`.
        throw Refusal(
            TRITONSERVER_ERROR_UNAVAILABLE, request.is_further ? ENGINE_ENDED : ENGINE_STARTING);
    }
    if (unsent_ > MOST_UNSENT) throw Refusal(TRITONSERVER_ERROR_UNAVAILABLE, ENGINE_SLOW);
    slots_.emplace(request.slot, Slot{std::move(reply)});
    append(request.frame);
}

// Appends a frame for the writer. The mutex is held.
void Front::append(const std::string& frame) {
    // A writer that still has frames to send looks for new ones by itself.
    bool idle = outgoing_.empty();
    outgoing_ += frame;
    unsent_ += frame.size();
    if (idle) frames_waiting_.notify_one();
}

void Front::run() {
    while (true) {
        int socket = connect_to_engine();
        if (socket >= 0) {
            bool stopping;
            {
                std::lock_guard<std::mutex> lock(mutex_);
                socket_ = socket;
                stopping = stopping_;
            }
            std::string reason;
            try {
                if (!stopping) exchange(socket);
            } catch (const std::exception& error) {
                reason = error.what();
            }
            {
                std::lock_guard<std::mutex> lock(mutex_);
                ready_ = false;
                socket_ = -1;
                outgoing_.clear();
                unsent_ = 0;
                stopping = stopping_;
            }
            frames_waiting_.notify_one();
            // The writer may be in the middle of a frame.
            ::shutdown(socket, SHUT_RDWR);
            if (writer_.joinable()) writer_.join();
            ::close(socket);
            fail_all(stopping ? SHUTTING_DOWN : ENGINE_ENDED);
            // The reader tries to connect ten times a second. A reason is logged once.
            if (!stopping && reason != last_complaint_) {
                log(TRITONSERVER_LOG_ERROR, "engine: the connection has ended: " + reason);
                last_complaint_ = reason;
            }
        }
        std::unique_lock<std::mutex> lock(mutex_);
        if (changed_.wait_for(lock, BETWEEN_CONNECTIONS, [this] { return stopping_; })) return;
    }
}

int Front::connect_to_engine() const {
    // An engine whose queue of connections is full would block a connection.
    int socket = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (socket < 0) return -1;
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, socket_path_.c_str(), socket_path_.size());
    if (::connect(socket, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0 &&
        // The writer may wait for the engine.
        ::fcntl(socket, F_SETFL, 0) == 0) {
        return socket;
    }
    ::close(socket);
    return -1;
}

void Front::exchange(int socket) {
    ReceivedBytes incoming;
    bool greeted = false;
    auto next_check = Clock::now() + BETWEEN_CANCELLATION_CHECKS;
    while (true) {
        auto now = Clock::now();
        if (now >= next_check) {
            report_cancelled();
            next_check = now + BETWEEN_CANCELLATION_CHECKS;
        }
        auto wait = std::chrono::ceil<milliseconds>(next_check - now);
        pollfd ready_to_read{socket, POLLIN, 0};
        int count = ::poll(&ready_to_read, 1, static_cast<int>(wait.count()));
        if (count == 0 || (count < 0 && errno == EINTR)) continue;
        size_t room;
        char* buffer = incoming.room(&room);
        ssize_t received = ::recv(socket, buffer, room, MSG_DONTWAIT);
        if (received < 0 && (errno == EAGAIN || errno == EINTR)) continue;
        if (received < 0) throw std::runtime_error(std::strerror(errno));
        if (received == 0) throw std::runtime_error("the process of the model has closed it");
        incoming.received(static_cast<size_t>(received));
        while (auto bytes = incoming.next_frame()) {
            EngineFrame frame = read_engine_frame(*bytes);
            auto* ready = std::get_if<Ready>(&frame);
            if (greeted == (ready != nullptr)) {
                throw FrameError("the frame `ready` must come once, before all others");
            }
            if (ready == nullptr) {
                handle(frame);
                continue;
            }
            check_version(*ready);
            greeted = true;
            become_ready();
            writer_ = std::thread([this, socket] { write_frames(socket); });
        }
    }
}

void Front::check_version(const Ready& ready) {
    if (ready.version == PROTOCOL_VERSION) return;
    std::lock_guard<std::mutex> lock(mutex_);
    wrong_version_ = "engine: it speaks version " + std::to_string(ready.version) +
                     " of the protocol, and this front version " +
                     std::to_string(PROTOCOL_VERSION);
    changed_.notify_all();
    throw FrameError(wrong_version_);
}

void Front::become_ready() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        ready_ = true;
        wrong_version_.clear();
    }
    changed_.notify_all();
    last_complaint_.clear();
    log(TRITONSERVER_LOG_INFO, "engine: connected at " + socket_path_);
}

void Front::handle(const EngineFrame& frame) {
    if (auto* audio = std::get_if<Audio>(&frame)) {
        handle(*audio);
    } else if (auto* finished = std::get_if<Finished>(&frame)) {
        finish(finished->slot);
    } else if (auto* failed = std::get_if<Failed>(&frame)) {
        fail(failed->slot, static_cast<TRITONSERVER_Error_Code>(failed->status), failed->text);
    }
}

void Front::handle(const Audio& audio) {
    Reply* reply;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        auto slot = slots_.find(audio.slot);
        if (slot == slots_.end()) return;
        reply = &slot->second.reply;
    }
    if (reply->send(audio.outputs)) return;
    std::lock_guard<std::mutex> lock(mutex_);
    slots_.erase(audio.slot);
}

void Front::finish(uint64_t slot) {
    std::unique_lock<std::mutex> lock(mutex_);
    auto ended = slots_.extract(slot);
    lock.unlock();
    if (!ended.empty()) ended.mapped().reply.finish();
}

void Front::fail(uint64_t slot, TRITONSERVER_Error_Code code, const std::string& text) {
    std::unique_lock<std::mutex> lock(mutex_);
    auto ended = slots_.extract(slot);
    lock.unlock();
    if (!ended.empty()) ended.mapped().reply.fail(code, text);
}

void Front::fail_all(const std::string& text) {
    std::unordered_map<uint64_t, Slot> ended;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        ended.swap(slots_);
    }
    for (auto& slot : ended) slot.second.reply.fail(TRITONSERVER_ERROR_UNAVAILABLE, text);
}

void Front::report_cancelled() {
    std::vector<std::pair<uint64_t, Slot*>> open;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        for (auto& [number, slot] : slots_) {
            if (!slot.cancelled) open.emplace_back(number, &slot);
        }
    }
    for (auto& [number, slot] : open) {
        if (!slot->reply.is_cancelled()) continue;
        slot->cancelled = true;
        std::lock_guard<std::mutex> lock(mutex_);
        append(cancelled_frame(number));
    }
}

void Front::write_frames(int socket) {
    std::string frames;
    while (true) {
        {
            std::unique_lock<std::mutex> lock(mutex_);
            frames_waiting_.wait(lock, [this] { return !ready_ || !outgoing_.empty(); });
            if (!ready_) return;
            frames.swap(outgoing_);
        }
        for (std::string_view unsent = frames; !unsent.empty();) {
            std::string_view part = unsent.substr(0, SENT_AT_ONCE);
            unsent.remove_prefix(part.size());
            {
                // Before the call: an engine may answer what it has read before the call returns,
                // and the client's next request must find the last one sent.
                std::lock_guard<std::mutex> lock(mutex_);
                if (!ready_) return;
                unsent_ -= part.size();
            }
            if (send_all(socket, part)) continue;
            // The reader sees the end of the connection.
            ::shutdown(socket, SHUT_RDWR);
            return;
        }
        frames.clear();
        if (frames.capacity() > LARGEST_IDLE_STORAGE) frames.shrink_to_fit();
    }
}

}  // namespace token2wav
