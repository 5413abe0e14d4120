// SPDX-License-Identifier: Apache-2.0
//
// A tensor as it is, behind a node of its own in the graph: what [Note: joints] in hooks.py needs, without the interpreter.

#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/utils/pybind.h>

namespace {

struct Joint : torch::autograd::Function<Joint> {
    // Detached as stock's own nodes do it: the memory and the count of writes stay the tensor's, and it is no view to autograd.
    static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& tensor) { return tensor.detach(); }

    static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, torch::autograd::variable_list grads)
    {
        return grads;
    }
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module)
{
    module.def("joint", [](const at::Tensor& tensor) { return Joint::apply(tensor); });
}
