// native_cpu.cpp's pass over a model and a text that a test wrote, where no Python runs: for another processor, emulated.
//
// stdin: tensors (how many; of each its address there, its bytes, itself), Model, its layers, then kind, capacity,
// passes, their widths, and all ids. stdout: logits of every token.

#include "../draftlab/model/native_cpu.cpp"

#include <cstdio>
#include <cstdlib>
#include <map>

template <class T>
std::vector<T> read(size_t count) {
    std::vector<T> values(count);
    if (fread(values.data(), sizeof(T), count, stdin) != count) std::exit(2);
    return values;
}

using Tensors = std::map<uint64_t, std::vector<char>>;

template <class T>
void relocate(T& it, const Tensors& tensors) {
    char* at = reinterpret_cast<char*>(&it);
    for (size_t i = 0; i + 8 <= sizeof it; i += 8) {
        uint64_t word;
        std::memcpy(&word, at + i, 8);
        const auto found = tensors.find(word);
        if (found == tensors.end()) continue;
        const char* here = found->second.data();
        std::memcpy(at + i, &here, 8);
    }
}

int main() {
    for (size_t n = 1; n < 5000; n += 3)  // activations begin with a cache line, whatever was allocated before
        if (reinterpret_cast<uintptr_t>(Buffer<float>(n).data()) % 64) std::exit(3);
    Tensors tensors;
    for (int64_t left = read<int64_t>(1)[0]; left; left--) {
        const auto head = read<uint64_t>(2);
        tensors[head[0]] = read<char>(head[1]);
    }
    Model model = read<Model>(1)[0];
    auto layers = read<Layer>(model.layers);
    relocate(model, tensors);
    for (auto& layer : layers) relocate(layer, tensors);
    model.layer = layers.data();
    const auto head = read<int>(3);
    const int kind = head[0], capacity = head[1];
    const auto widths = read<int>(head[2]);
    int (*const runs[])(const Model*, const Pass*, int64_t*) = {run_float32, run_bfloat16, run_int8_float32, run_int8_bfloat16};
    std::vector<float> keys(size_t(model.layers) * model.kv_heads * capacity * model.head_dim), values(keys);
    int64_t used = 0;
    for (const int width : widths) {
        const auto ids = read<int64_t>(width);
        std::vector<float> logits(size_t(width) * model.vocab);
        const Pass now{1, width, width, capacity, ids.data(), &used, nullptr, nullptr, keys.data(), values.data(), logits.data()};
        int64_t wrong;
        if (runs[kind](&model, &now, &wrong)) std::exit(4);
        used += width;
        fwrite(logits.data(), sizeof(float), logits.size(), stdout);
    }
}
