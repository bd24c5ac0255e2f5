// Command lines: each option is a variable with its default, changed by --name value or --name=value.
#pragma once

#include <charconv>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "fived/error.hpp"
#include "fived/named.hpp"

namespace fived {

class Options {
  public:
    explicit Options(std::string purpose) : purpose_(std::move(purpose)) {}

    void add(const std::string& name, std::string& variable, const std::string& help) {
        add(name, help, variable, [&variable](std::string_view value) { variable = value; });
    }
    /// One of `choices`, by name.
    template <Named E>
    void add(const std::string& name, E& variable, const std::vector<E>& choices, const std::string& help) {
        add_choice(name, name_of(variable), words_of(choices), help,
                   [=, &variable](std::size_t i) { variable = choices[i]; });
    }
    /// One of all values of E, by name.
    template <Named E>
    void add(const std::string& name, E& variable, const std::string& help) {
        add(name, variable, values_of<E>(), help);
    }
    /// One of all values of E, by name, or by the word `every` none of them, which stands for every one.
    template <Named E>
    void add(const std::string& name, std::optional<E>& variable, const std::string& every,
             const std::string& help) {
        std::vector<std::string> words = words_of(values_of<E>());
        words.insert(words.begin(), every);
        add_choice(name, variable ? name_of(*variable) : every, words, help,
                   [&variable](std::size_t i) { variable = i > 0 ? std::optional(E(i - 1)) : std::nullopt; });
    }
    /// A number from `least` to `most`.
    template <class N>
    void add(const std::string& name, N& variable, N least, const std::string& help, N most = 1000000000) {
        add(name, help, print(variable), [=, &variable](std::string_view value) {
            const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), variable);
            if (error != std::errc() || end != value.data() + value.size() || !(variable >= least) ||
                variable > most)
                throw UsageError("--" + name + " " + std::string(value) + ": give a number from " +
                                 print(least) + " to " + print(most));
        });
    }
    void flag(const std::string& name, bool& variable, const std::string& help) {
        options_.push_back({name, help, "", true, [&variable](std::string_view) { variable = true; }});
    }

    /// Sets the variables. Raises UsageError for what it does not know.
    void parse(int argc, char** argv) const {
        for (int i = 1; i < argc; ++i) {
            const std::string_view word = argv[i];
            const std::size_t equals = word.find('=');
            const Option& option = find(word.substr(0, equals));
            if (option.is_flag) {
                if (equals != word.npos) throw UsageError("--" + option.name + " takes no value");
                option.set("");
            } else if (equals != word.npos) {
                option.set(word.substr(equals + 1));
            } else {
                if (++i == argc) throw UsageError("--" + option.name + " needs a value");
                option.set(argv[i]);
            }
        }
    }
    std::string help() const {
        std::string text = purpose_ + "\n\n";
        for (const Option& option : options_) {
            std::string line = "  --" + option.name;
            line.resize(std::max<std::size_t>(20, line.size() + 1), ' ');
            text +=
                line + option.help + (option.standard.empty() ? "" : "; default " + option.standard) + "\n";
        }
        return text;
    }

  private:
    struct Option {
        std::string name, help, standard;
        bool is_flag;
        std::function<void(std::string_view)> set;
    };

    template <Named E>
    static std::vector<std::string> words_of(const std::vector<E>& values) {
        std::vector<std::string> words;
        for (const E value : values) words.emplace_back(name_of(value));
        return words;
    }
    /// One of `words`: set(i) of the i-th.
    template <class Set>
    void add_choice(const std::string& name, const std::string& standard,
                    const std::vector<std::string>& words, const std::string& help, Set set) {
        std::string list;
        for (const std::string& word : words) list += (list.empty() ? "" : ", ") + word;
        add(name, help + " (" + list + ")", standard, [=](std::string_view given) {
            const auto found = std::ranges::find(words, given);
            if (found == words.end())
                throw UsageError("--" + name + " " + std::string(given) + ": choose one of " + list);
            set(std::size_t(found - words.begin()));
        });
    }
    void add(const std::string& name, const std::string& help, const std::string& standard,
             std::function<void(std::string_view)> set) {
        options_.push_back({name, help, standard, false, std::move(set)});
    }
    const Option& find(std::string_view word) const {
        for (const Option& option : options_)
            if (word == "--" + option.name) return option;
        throw UsageError("unknown option " + std::string(word) + "; --help lists them");
    }
    template <class N>
    static std::string print(N value) {
        char digits[32];
        return {digits, std::to_chars(digits, digits + sizeof digits, value).ptr};
    }

    std::string purpose_;
    std::vector<Option> options_;
};

}  // namespace fived
