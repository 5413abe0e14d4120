// SPDX-License-Identifier: Apache-2.0
//
// CPU Adam outside the interpreter lock: a binding over DeepSpeed's shipped csrc/adam/cpu_adam_impl.cpp, which is compiled
// beside this file. Same functions and bits as DeepSpeed's own binding, which holds the lock while it computes.
//
// Without that lock the kernel's table of optimizers and the state inside one optimizer need locks of their own: updates
// of different optimizers run at the same time, updates of one take turns, create and destroy run alone.

#include <omp.h>
#include <torch/csrc/utils/pybind.h>

#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>

// What cpu_adam.h declares. Its templates would double the time that this file takes to compile.
int create_adam_optimizer(int, float, float, float, float, float, bool, bool);
int destroy_adam_optimizer(int);
int ds_adam_step(int, size_t, float, float, float, float, float, bool,
                 at::Tensor&, at::Tensor&, at::Tensor&, at::Tensor&);

namespace {

std::shared_mutex table_lock;
std::unordered_map<int, std::mutex> turns;
thread_local int thread_limit = 0;

class BoundedThreads {
public:
    BoundedThreads() : before_(omp_get_max_threads())
    {
        if (thread_limit > 0) { omp_set_num_threads(thread_limit); }
    }
    ~BoundedThreads() { omp_set_num_threads(before_); }
    BoundedThreads(const BoundedThreads&) = delete;
    BoundedThreads& operator=(const BoundedThreads&) = delete;

private:
    int before_;
};

// The kernel reads all four by plain pointers and updates a copy of what is not contiguous.
void check_tensors(const at::Tensor& params,
                   const at::Tensor& grads,
                   const at::Tensor& exp_avg,
                   const at::Tensor& exp_avg_sq)
{
    for (const auto* tensor : {&params, &grads, &exp_avg, &exp_avg_sq}) {
        if (!tensor->device().is_cpu() || !tensor->is_contiguous() || tensor->numel() != params.numel()) {
            throw std::invalid_argument("CPU Adam takes four contiguous tensors of one size in host memory");
        }
    }
    if (grads.scalar_type() != params.scalar_type() || exp_avg_sq.scalar_type() != exp_avg.scalar_type()) {
        throw std::invalid_argument("CPU Adam takes gradients in the parameters' dtype, and both moments in one dtype");
    }
}

int create(int id, float lr, float beta1, float beta2, float eps, float weight_decay, bool adamw, bool log)
{
    std::unique_lock alone(table_lock);
    turns.try_emplace(id);
    return create_adam_optimizer(id, lr, beta1, beta2, eps, weight_decay, adamw, log);
}

int destroy(int id)
{
    std::unique_lock alone(table_lock);
    turns.erase(id);
    return destroy_adam_optimizer(id);
}

int update(int id, size_t step, float lr, float beta1, float beta2, float eps, float weight_decay, bool bias_correction,
           at::Tensor& params, at::Tensor& grads, at::Tensor& exp_avg, at::Tensor& exp_avg_sq)
{
    check_tensors(params, grads, exp_avg, exp_avg_sq);
    std::shared_lock with_others(table_lock);
    const auto turn = turns.find(id);
    if (turn == turns.end()) {
        throw std::invalid_argument("there is no CPU Adam optimizer " + std::to_string(id));
    }
    std::lock_guard my_turn(turn->second);
    BoundedThreads bounded;
    return ds_adam_step(id, step, lr, beta1, beta2, eps, weight_decay, bias_correction, params, grads, exp_avg, exp_avg_sq);
}

void set_num_threads(int num_threads)
{
    if (num_threads < 0) { throw std::invalid_argument("num_threads must be 0 (OpenMP's choice) or more"); }
    thread_limit = num_threads;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m)
{
    using without_lock = pybind11::call_guard<pybind11::gil_scoped_release>;
    m.def("create_adam", &create, "As DeepSpeed's cpu_adam", without_lock());
    m.def("destroy_adam", &destroy, "As DeepSpeed's cpu_adam; waits for updates that are running", without_lock());
    m.def("adam_update", &update, "As DeepSpeed's cpu_adam, outside the interpreter lock", without_lock());
    m.def("set_num_threads", &set_num_threads,
          "OpenMP threads of the updates that the calling thread will make; 0: OpenMP's choice");
}
