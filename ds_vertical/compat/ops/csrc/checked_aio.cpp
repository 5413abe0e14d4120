// SPDX-License-Identifier: Apache-2.0
//
// Reads and writes past the page cache whose every result is checked. Context and control blocks are DeepSpeed's shipped
// csrc/aio/common (deepspeed_aio_types.cpp, deepspeed_aio_utils.cpp), compiled beside this file; what DeepSpeed does with
// the completions (count them, assert) is not used.
//
// [Note: one thread, one descriptor] A worker per queue keeps up to queue_depth blocks in flight, across operations. It
// sleeps on one eventfd, which the kernel signals for every completed block and the callers for every new operation.

#include <errno.h>
#include <fcntl.h>
#include <pybind11/pybind11.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "deepspeed_aio_utils.h"

namespace {

constexpr int64_t sector_bytes = 512;  // the smallest unit in which O_DIRECT can go on after a short transfer

int64_t now_ns()
{
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return int64_t(time.tv_sec) * 1000000000 + time.tv_nsec;
}

struct Result {
    int64_t start_ns = 0;      // first block handed to the kernel
    int64_t end_ns = 0;        // last block complete
    int error = 0;             // errno, 0 if all went well
    const char* call = "";     // what failed: "open", "read" or "write"
    int64_t offset = 0;        // of the first byte in the file that was not transferred
    int64_t transferred = 0;   // bytes before that
};

struct Operation {
    bool is_read;
    char* buffer;
    int64_t num_bytes;
    std::string path;
    int64_t offset;
    int folder;  // the descriptor of the folder in which `path` is a name; AT_FDCWD: it is a whole path

    int fd = -1;
    std::unique_ptr<io_xfer_ctxt> transfer;  // the generator keeps a reference to this very pointer
    std::unique_ptr<io_prep_generator> blocks;
    int64_t outstanding = 0;  // blocks prepared and neither complete nor failed
    bool finished = false;
    Result result;

    const char* verb() const { return is_read ? "read" : "write"; }

    void fail(int error, const char* call, int64_t at)
    {
        if (result.error == 0 || at < result.offset) {  // the first byte that is missing
            result.error = error;
            result.call = call;
            result.offset = at;
        }
    }
};

struct Block {
    Operation* operation;
    char* buffer;
    int64_t num_bytes;
    int64_t offset;
};

class Engine {
public:
    Engine(int block_size, int queue_depth, bool single_submit)
        : single_submit_(single_submit), context_(block_size, queue_depth), wake_(eventfd(0, EFD_CLOEXEC))
    {
        if (wake_ < 0 || context_._io_ctxt == nullptr) {
            error_ = wake_ < 0 ? errno : EAGAIN;
            return;
        }
        free_ = context_._iocbs;
        sigset_t all, before;  // signals are for Python's threads
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        worker_ = std::thread([this] { run(); });
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    // Completes what is in flight.
    ~Engine()
    {
        if (worker_.joinable()) {
            stop_ = true;
            wake();
            worker_.join();
        }
        if (wake_ >= 0) { close(wake_); }
    }

    int error() const { return error_; }

    int64_t issue(bool is_read, char* buffer, int64_t num_bytes, std::string path, int64_t offset, int folder)
    {
        auto operation = std::make_shared<Operation>();
        operation->is_read = is_read;
        operation->buffer = buffer;
        operation->num_bytes = num_bytes;
        operation->path = std::move(path);
        operation->offset = offset;
        operation->folder = folder < 0 ? AT_FDCWD : folder;
        int64_t id;
        {
            std::lock_guard lock(mutex_);
            id = next_id_++;
            known_[id] = operation;
            arrived_.push_back(operation);
            ++unfinished_;
        }
        wake();
        return id;
    }

    // True once the operation is complete, and then it is forgotten; false after `slice`. -1: no such operation.
    int wait(int64_t id, std::chrono::milliseconds slice, Result& result)
    {
        std::unique_lock lock(mutex_);
        const auto found = known_.find(id);
        if (found == known_.end()) { return -1; }
        const auto operation = found->second;
        if (!finished_.wait_for(lock, slice, [&] { return operation->finished; })) { return 0; }
        result = operation->result;
        known_.erase(id);
        return 1;
    }

    // As `wait`, at once.
    int poll(int64_t id, Result& result)
    {
        std::lock_guard lock(mutex_);
        const auto found = known_.find(id);
        if (found == known_.end()) { return -1; }
        if (!found->second->finished) { return 0; }
        result = found->second->result;
        known_.erase(found);
        return 1;
    }

    bool wait_all(std::chrono::milliseconds slice)
    {
        std::unique_lock lock(mutex_);
        return finished_.wait_for(lock, slice, [this] { return unfinished_ == 0; });
    }

    int64_t pending()
    {
        std::lock_guard lock(mutex_);
        return unfinished_;
    }

private:
    void wake()
    {
        const uint64_t one = 1;
        while (write(wake_, &one, sizeof(one)) < 0 && errno == EINTR) {}
    }

    void sleep()
    {
        uint64_t count;
        while (read(wake_, &count, sizeof(count)) < 0 && errno == EINTR) {}
    }

    void run()
    {
        while (true) {
            {
                std::lock_guard lock(mutex_);
                active_.insert(active_.end(), arrived_.begin(), arrived_.end());
                arrived_.clear();
                if (stop_ && unfinished_ == 0) { return; }
            }
            prepare();
            submit();
            if (in_flight_ > 0 || active_.empty()) { sleep(); }
            reap();
        }
    }

    // Fill the free control blocks: remainders of short transfers first, then the operations in the order of their issue.
    void prepare()
    {
        while (!free_.empty() && !remainders_.empty()) {
            const Block block = remainders_.front();
            remainders_.pop_front();
            iocb* control = free_.back();
            free_.pop_back();
            const auto prepare_one = block.operation->is_read ? io_prep_pread : io_prep_pwrite;
            prepare_one(control, block.operation->fd, block.buffer, block.num_bytes, block.offset);
            enlist(control, block.operation);
        }
        while (!free_.empty() && !active_.empty()) {
            Operation* operation = active_.front().get();
            const bool more = (operation->fd >= 0 || start(operation)) && operation->result.error == 0;
            const int count = more ? operation->blocks->prep_iocbs(free_.size(), &free_) : 0;
            operation->outstanding += count;
            for (int i = 0; i < count; ++i) { enlist(free_[i], operation); }
            free_.erase(free_.begin(), free_.begin() + count);
            if (count == 0 || operation->blocks->_remaining_io_blocks == 0) {
                operation->blocks.reset();
                const auto keep = active_.front();
                active_.pop_front();
                finish_if_done(operation);
            }
        }
    }

    void enlist(iocb* control, Operation* operation)
    {
        control->data = operation;
        io_set_eventfd(control, wake_);
        prepared_.push_back(control);
    }

    bool start(Operation* operation)
    {
        operation->result.start_ns = now_ns();
        // a checkpoint's files may be links to others; a run's own, and what we write, never is one, unless somebody has put
        // it there
        const int access = operation->is_read ? O_RDONLY : O_WRONLY | O_CREAT;
        const int links = operation->is_read && operation->folder == AT_FDCWD ? 0 : O_NOFOLLOW;
        operation->fd = openat(operation->folder, operation->path.c_str(), access | links | O_DIRECT | O_CLOEXEC, 0600);
        if (operation->fd < 0) {
            operation->fail(errno, "open", operation->offset);
            return false;
        }
        operation->transfer = std::make_unique<io_xfer_ctxt>(
            operation->fd, operation->offset, 0, operation->num_bytes, operation->buffer);
        operation->blocks =
            std::make_unique<io_prep_generator>(operation->is_read, operation->transfer, context_._block_size);
        return true;
    }

    void submit()
    {
        size_t done = 0;
        while (done < prepared_.size()) {
            const long count = single_submit_ ? 1 : prepared_.size() - done;
            const int taken = io_submit(context_._io_ctxt, count, prepared_.data() + done);
            if (taken > 0) {
                done += taken;
                in_flight_ += taken;
            } else if (taken == 0 || taken == -EAGAIN || taken == -EINTR) {
                if (in_flight_ > 0) { break; }  // once something is complete
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
            } else {
                settle(prepared_[done++], taken);
            }
        }
        prepared_.erase(prepared_.begin(), prepared_.begin() + done);
    }

    void reap()
    {
        timespec at_once = {0, 0};
        // fails for no other reason than a signal, which this thread does not get, or a context that is not ours
        const int count = io_getevents(context_._io_ctxt, 0, context_._queue_depth, context_._io_events.data(), &at_once);
        for (int i = 0; i < count; ++i) {
            --in_flight_;
            settle(context_._io_events[i].obj, int64_t(context_._io_events[i].res));
        }
    }

    // `moved`: bytes, or a negative errno.
    void settle(iocb* control, int64_t moved)
    {
        auto* operation = static_cast<Operation*>(control->data);
        Block rest{operation, static_cast<char*>(control->u.c.buf), int64_t(control->u.c.nbytes), control->u.c.offset};
        free_.push_back(control);
        if (moved < 0) {
            operation->fail(int(-moved), operation->verb(), rest.offset);
        } else if (moved < rest.num_bytes) {
            rest.buffer += moved;
            rest.num_bytes -= moved;
            rest.offset += moved;
            if (moved > 0 && moved % sector_bytes == 0) {
                remainders_.push_back(rest);
                return;
            }
            // the end of the file, or a device that takes nothing and does not say why
            operation->fail(operation->is_read ? ENODATA : EIO, operation->verb(), rest.offset);
        }
        --operation->outstanding;
        finish_if_done(operation);
    }

    void finish_if_done(Operation* operation)
    {
        if (operation->outstanding > 0 || operation->blocks != nullptr) { return; }
        if (operation->fd >= 0) { close(operation->fd); }
        Result& result = operation->result;
        result.end_ns = now_ns();
        result.transferred = result.error == 0 ? operation->num_bytes : result.offset - operation->offset;
        std::lock_guard lock(mutex_);
        operation->finished = true;
        --unfinished_;
        finished_.notify_all();
    }

    const bool single_submit_;
    aio_context context_;
    const int wake_;
    int error_ = 0;
    std::thread worker_;
    std::atomic<bool> stop_{false};

    std::mutex mutex_;  // guards what follows up to the blank line, and Operation::finished and its result
    std::condition_variable finished_;
    std::map<int64_t, std::shared_ptr<Operation>> known_;
    std::deque<std::shared_ptr<Operation>> arrived_;
    int64_t next_id_ = 0;
    int64_t unfinished_ = 0;

    std::deque<std::shared_ptr<Operation>> active_;  // the worker's own, like the rest
    std::deque<Block> remainders_;
    std::vector<iocb*> free_;
    std::vector<iocb*> prepared_;
    int64_t in_flight_ = 0;
};

namespace py = pybind11;

constexpr auto slice = std::chrono::milliseconds(100);  // how long Ctrl-C may have to wait

// [Note: the interpreter's lock] Given up by whoever waits, and by nobody else: to issue or to poll takes a microsecond, and a
// thread that gives the lock up for that waits for it longer, while the thread that trains gets it and loses it again.
class Queue {
public:
    Queue(int block_size, int queue_depth, bool single_submit) : process_(getpid())
    {
        if (block_size < sector_bytes || block_size % sector_bytes != 0 || queue_depth < 1) {
            throw py::value_error("block_size must be a multiple of 512 bytes and queue_depth at least 1");
        }
        engine_ = std::make_unique<Engine>(block_size, queue_depth, single_submit);
        if (engine_->error() != 0) {
            errno = engine_->error();
            engine_.reset();
            PyErr_SetFromErrno(PyExc_OSError);
            throw py::error_already_set();
        }
    }

    ~Queue()
    {
        if (getpid() != process_) {
            engine_.release();  // a fork has no worker to end
            return;
        }
        py::gil_scoped_release unlocked;
        engine_.reset();
    }

    int64_t read(uintptr_t address, int64_t num_bytes, std::string path, int64_t offset, int folder)
    {
        return issue(true, address, num_bytes, std::move(path), offset, folder);
    }

    int64_t write(uintptr_t address, int64_t num_bytes, std::string path, int64_t offset, int folder)
    {
        return issue(false, address, num_bytes, std::move(path), offset, folder);
    }

    py::tuple wait(int64_t id)
    {
        Result result;
        while (take(id, result) == 0) { check_signals(); }
        return to_tuple(result);
    }

    py::object poll(int64_t id)
    {
        Result result;
        return checked(id, engine_->poll(id, result)) == 0 ? py::object(py::none()) : to_tuple(result);
    }

    void wait_all()
    {
        while (true) {
            {
                py::gil_scoped_release unlocked;
                if (engine_->wait_all(slice)) { return; }
            }
            check_signals();
        }
    }

    int64_t pending() { return engine_->pending(); }

private:
    int64_t issue(bool is_read, uintptr_t address, int64_t num_bytes, std::string path, int64_t offset, int folder)
    {
        if (num_bytes < 0 || offset < 0) { throw py::value_error("num_bytes and offset must be 0 or more"); }
        return engine_->issue(is_read, reinterpret_cast<char*>(address), num_bytes, std::move(path), offset, folder);
    }

    int take(int64_t id, Result& result)
    {
        int state;
        {
            py::gil_scoped_release unlocked;
            state = engine_->wait(id, slice, result);
        }
        return checked(id, state);
    }

    static int checked(int64_t id, int state)
    {
        if (state < 0) { throw py::value_error("operation " + std::to_string(id) + " is not of this queue or was waited for"); }
        return state;
    }

    static py::tuple to_tuple(const Result& r)
    {
        return py::make_tuple(r.start_ns, r.end_ns, r.error, r.call, r.offset, r.transferred);
    }

    static void check_signals()
    {
        if (PyErr_CheckSignals() != 0) { throw py::error_already_set(); }
    }

    const pid_t process_;
    std::unique_ptr<Engine> engine_;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m)
{
    using namespace py::literals;
    py::class_<Queue>(m, "Queue", "Reads and writes past the page cache; dropping it completes what is in flight.")
        .def(py::init<int, int, bool>(), "block_size"_a, "queue_depth"_a, "single_submit"_a = false)
        .def("read", &Queue::read, "address"_a, "num_bytes"_a, "path"_a, "offset"_a, "folder"_a = -1,
             "Issue a read; returns its id. `folder`: the descriptor of the one in which `path` is a name, and no link.")
        .def("write", &Queue::write, "address"_a, "num_bytes"_a, "path"_a, "offset"_a, "folder"_a = -1,
             "Issue a write; returns its id. `folder`: as of a read.")
        .def("wait", &Queue::wait, "id"_a,
             "Complete one operation, once: (start_ns, end_ns, errno, call, offset, bytes transferred before offset).")
        .def("poll", &Queue::poll, "id"_a, "As wait where the operation is complete, None where it is not.")
        .def("wait_all", &Queue::wait_all, "Until nothing is in flight; the results stay to be waited for.")
        .def("pending", &Queue::pending, "Operations in flight.");
}
