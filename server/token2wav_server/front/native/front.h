// Forwards requests to the engine, the process with the model, over a Unix socket, and sends its
// replies.
//
// Three threads take part. Triton's thread submits requests. The *reader* connects to the engine,
// reads its frames, asks every 50 ms which requests are cancelled, and fails all open ones when the
// engine has gone. The *writer*, which lives as long as a connection, sends what has collected.
//
// The reader alone uses the replies in `slots_`, and it alone removes them. So no reply is used by
// two threads, or after its end, and Triton is never called with `mutex_` held: a slot in the map
// stays where it is while others are added.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>

#include "frames.h"
#include "triton.h"

namespace token2wav {

// A request as its frame, which refers to no memory of Triton.
struct Outgoing {
    uint64_t slot;
    std::string frame;
    bool is_further;  // it belongs to a sequence, and is not the first one of it
};

// Copies a request into its frame. Throws Refusal if it is too long.
Outgoing outgoing_request(const Request& request);

class Front {
public:
    // Starts to connect to the engine.
    explicit Front(const std::string& socket_path);

    // Closes the connection, and fails all open requests.
    ~Front();

    // Returns once the engine is ready. Throws Refusal if it is not, after the patience or at once
    // if it speaks another version of the protocol.
    void wait_until_ready(std::chrono::seconds patience);

    // Returns a number for the slot of a request. No number is returned twice.
    uint64_t new_slot() { return next_slot_++; }

    // Queues a request for the engine, and takes over its reply. It does not wait for the engine.
    //
    // Throws Refusal, and leaves the reply, if the request cannot be forwarded.
    void submit(const Outgoing& request, Reply& reply);

private:
    struct Slot {
        Reply reply;
        bool cancelled = false;  // the engine has been told
    };

    void run();
    // Returns a connected socket, or -1.
    int connect_to_engine() const;
    // Exchanges frames until the connection ends. Always throws an exception with the reason.
    void exchange(int socket);
    // Throws FrameError, and ends `wait_until_ready`, if the version is not that of this front.
    void check_version(const Ready& ready);
    void handle(const EngineFrame& frame);
    void handle(const Audio& audio);
    void finish(uint64_t slot);
    void fail(uint64_t slot, TRITONSERVER_Error_Code code, const std::string& text);
    void fail_all(const std::string& text);
    void report_cancelled();
    void become_ready();
    void write_frames(int socket);
    void append(const std::string& frame);

    const std::string socket_path_;
    std::atomic<uint64_t> next_slot_{1};

    // Only for the reader.
    std::string last_complaint_;
    std::thread writer_;

    std::mutex mutex_;
    std::condition_variable changed_;        // ready_, stopping_ or wrong_version_
    std::condition_variable frames_waiting_;  // outgoing_, or ready_ has become false
    bool stopping_ = false;
    bool ready_ = false;  // the engine is connected, and has sent its first frame
    std::string wrong_version_;
    int socket_ = -1;
    std::unordered_map<uint64_t, Slot> slots_;
    std::string outgoing_;  // frames that the writer has not taken
    size_t unsent_ = 0;  // bytes of frames that have not been sent

    std::thread reader_;
};

}  // namespace token2wav
