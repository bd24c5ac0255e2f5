// Checkpoints: whole tensors that some ranks write and others read, and files that are not what they should be.
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "check.hpp"
#include "fived/lesson/checkpoint.hpp"
#include "fived/math/partition.hpp"
#include "fived/math/sha256.hpp"
#include "fived/mpi/environment.hpp"

using namespace fived;

namespace {

/// A matrix [rows, columns] of which each rank has rows or columns, or all of it, and may have nothing.
template <class T>
struct Held {
    std::size_t rows, columns, row = 0, column = 0, n_rows = rows, n_columns = columns;
    std::vector<T> numbers;

    std::size_t place(std::size_t i) const {
        return (row + i / n_columns) * columns + column + i % n_columns;
    }
    void fill() {
        numbers.resize(n_rows * n_columns);
        for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = T(place(i)) - T(0.5);
    }
    Piece piece(const std::string& name, bool written = true) {
        numbers.resize(n_rows * n_columns);
        const auto runs = runs_of(numbers.size(), [&](std::size_t i) { return place(i); });
        return {name, {rows, columns}, runs, std::span(numbers), written};
    }
};

template <class T>
Held<T> by_rows(const Communicator& world, std::size_t rows, std::size_t columns) {
    const Range mine = range(rows, world.size(), world.rank());
    return {rows, columns, mine.begin, 0, mine.length, columns, {}};
}
template <class T>
Held<T> by_columns(const Communicator& world, std::size_t rows, std::size_t columns) {
    const Range mine = range(columns, world.size(), world.rank());
    return {rows, columns, 0, mine.begin, rows, mine.length, {}};
}

void test_any_cut_reads_any_other(const Communicator& world, const std::string& file) {
    // more than two of the blocks in which it is written, and fewer rows than ranks
    auto large = by_columns<double>(world, 700, 501), small = by_rows<double>(world, 2, 3);
    auto copies = Held<float>{5, 1, 0, 0, 5, 1, {}};
    large.fill(), small.fill(), copies.fill();
    save(world, file, {{"step", "7"}},
         {large.piece("large"), small.piece("small"),
          copies.piece("copies", world.rank() == world.size() - 1)});
    CHECK(!std::filesystem::exists(file + ".partial"));

    auto rows = by_rows<double>(world, 700, 501), columns = by_columns<double>(world, 2, 3);
    auto again = Held<float>{5, 1, 0, 0, 5, 1, {}};
    const std::vector<Piece> pieces{rows.piece("large"), columns.piece("small"), again.piece("copies")};
    Checkpoint checkpoint(world, file, pieces);
    CHECK(checkpoint.metadata() == Metadata{{"step", "7"}});
    checkpoint.read(pieces);
    auto expected = by_rows<double>(world, 700, 501), also = by_columns<double>(world, 2, 3);
    expected.fill(), also.fill();
    CHECK(rows.numbers == expected.numbers && columns.numbers == also.numbers &&
          again.numbers == copies.numbers);

    const std::vector<Piece> other{rows.piece("large"), columns.piece("small")};
    const std::string said = message_of([&] { Checkpoint(world, file, other); });
    CHECK(said ==
          (world.rank()
               ? ""
               : file + " is of another model or optimizer: copies is [5, 1] float32 there and missing "
                        "here; give the options it was made with, or another file"));
}

/// A disk that is full leaves the file that was there.
void test_a_full_disk(const Communicator& world, const std::string& file) {
    auto x = by_rows<double>(world, 300, 600);
    x.fill();
    save(world, file, {{"step", "1"}}, {x.piece("x")});
    if (world.rank() == 0) std::filesystem::create_symlink("/dev/full", file + ".partial");
    world.barrier();
    const std::string said = message_of([&] { save(world, file, {{"step", "2"}}, {x.piece("x")}); });
    CHECK(said == (world.rank() ? "" : file + " cannot be written: No space left on device"));
    const std::vector<Piece> pieces{x.piece("x")};
    CHECK(Checkpoint(world, file, pieces).metadata().at("step") == "1");
}

/// Every header that is cut short, and every one with a byte that is another, is read or refused.
void test_damaged_headers() {
    SafetensorsHeader header{{{"step", "7"}, {"said \"so\"", "C:\\"}},
                             {{"a", {"F64", {2, 3}}}, {"b", {"F32", {}}}}};
    header.lay_out();
    const std::string text = header.text().substr(8);
    const SafetensorsHeader again = SafetensorsReader::read(text);
    CHECK(again.metadata == header.metadata && again.text() == header.text() && again.bytes() == 52);
    for (std::size_t i = 0; i < text.find_last_of('}'); ++i) {
        CHECK(message_of([&] { SafetensorsReader::read(text.substr(0, i)); }) != "");
        for (int byte = 0; byte < 256; ++byte) {
            std::string other = text;
            other[i] = char(byte);
            message_of([&] { SafetensorsReader::read(other).bytes(); });
        }
    }
}

void test_sha256() {
    const auto hex = [](const std::string& text) {
        return sha256({reinterpret_cast<const std::uint8_t*>(text.data()), text.size()}).hex();
    };
    CHECK(hex("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    CHECK(hex("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    CHECK(hex("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq") ==
          "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    CHECK(hex(std::string(1000000, 'a')) ==
          "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

}  // namespace

int main(int argc, char** argv) {
    const Environment mpi(argc, argv);
    const Communicator world = Communicator::world();
    std::string folder = std::filesystem::temp_directory_path() / "fived-checkpoint-XXXXXX";
    if (world.rank() == 0 && !mkdtemp(folder.data())) return 1;
    world.broadcast(folder);
    test_any_cut_reads_any_other(world, folder + "/file");
    test_a_full_disk(world, folder + "/full");
    if (world.rank() == 0) test_damaged_headers(), test_sha256(), std::filesystem::remove_all(folder);
    return world.all_reduce(failures) > 0;
}
