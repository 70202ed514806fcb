// Extraction among near-identical records: the task records.
#include <algorithm>
#include <array>
#include <utility>

#include "tools/tasks/ruler/draws.h"
#include "tools/tasks/ruler/generators.h"
#include "tools/tasks/ruler/word_lists.h"

namespace keyhole::tools::ruler {
namespace {

constexpr std::string_view kRecordsTemplate =
    "A ledger follows. Memorize it.\n{context}\nQuestion: List every sale of the shop {shop} as "
    "JSON: an array of objects with the numbers \"receipt\", \"units\", \"price\" and \"lot\".";
constexpr std::string_view kRecordsPrefix = " Answer: All sales of the shop {shop}: [";
constexpr std::string_view kSale =
    "Receipt {receipt}: the shop {shop} sold {units} units for {price} coins in lot {lot}.";
constexpr std::string_view kSaleJson =
    R"({"receipt": {receipt}, "units": {units}, "price": {price}, "lot": {lot}})";

constexpr size_t kAskedSales = 4;

/// The numbers of a sale, as digits that do not begin with 0: receipt, units, price, lot.
using SaleNumbers = std::array<std::string, 4>;
constexpr std::array<size_t, 4> kSaleDigits = {5, 3, 3, 3};

std::string with_numbers(std::string_view text, const SaleNumbers& sale, std::string_view shop) {
  return filled(text, {{"receipt", sale[0]},
                       {"units", sale[1]},
                       {"price", sale[2]},
                       {"lot", sale[3]},
                       {"shop", shop}});
}

class RecordsGenerator : public Generator {
 public:
  explicit RecordsGenerator(const TaskSetup& setup) : random_(setup.seed) {}

  [[nodiscard]] SizeSearch size_search() const override {
    return {.step = 5, .probe = 10, .margin = 3};
  }

  [[nodiscard]] Sample draw(size_t /*index*/, size_t units) override {
    const std::string adjective = word_of(adjectives()), noun = word_of(nouns());
    const std::string shop = adjective + "-" + noun;
    std::vector<SaleNumbers> asked;
    while (asked.size() < kAskedSales) {
      const SaleNumbers sale = drawn_sale();
      if (std::find(asked.begin(), asked.end(), sale) == asked.end()) asked.push_back(sale);
    }
    std::vector<size_t> places = distinct(random_, kAskedSales, units);
    std::sort(places.begin(), places.end());

    std::vector<std::string> lines, references;
    for (size_t i = 0; i < units; ++i) {
      const size_t next = references.size();
      if (next < kAskedSales && places[next] == i) {
        lines.push_back(with_numbers(kSale, asked[next], shop));
        references.push_back(with_numbers(kSaleJson, asked[next], ""));
        continue;
      }
      lines.push_back(with_numbers(kSale, near_sale(asked), near_shop(adjective, noun)));
    }
    return {.prompt = filled(kRecordsTemplate, {{"context", joined(lines, "\n")}, {"shop", shop}}),
            .prefix = filled(kRecordsPrefix, {{"shop", shop}}),
            .references = references};
  }

 private:
  [[nodiscard]] const std::string& word_of(const std::vector<std::string>& words) {
    return words[random_.below(words.size())];
  }

  [[nodiscard]] SaleNumbers drawn_sale() {
    SaleNumbers sale;
    for (size_t i = 0; i < sale.size(); ++i) {
      sale[i] = std::to_string(1 + random_.below(9)) + random_.digits(kSaleDigits[i] - 1);
    }
    return sale;
  }

  /// An asked sale with another digit at one place; it is none of the asked ones.
  [[nodiscard]] SaleNumbers near_sale(const std::vector<SaleNumbers>& asked) {
    SaleNumbers sale;
    do {
      sale = asked[random_.below(asked.size())];
      std::string& number = sale[random_.below(sale.size())];
      const size_t place = random_.below(number.size());
      const std::string old = number;
      while (number == old || number.front() == '0') number[place] = random_.digits(1).front();
    } while (std::find(asked.begin(), asked.end(), sale) != asked.end());
    return sale;
  }

  /// The shop's name with another adjective or another noun.
  [[nodiscard]] std::string near_shop(const std::string& adjective, const std::string& noun) {
    std::string other_adjective = adjective, other_noun = noun;
    if (random_.chance(50)) {
      while (other_adjective == adjective) other_adjective = word_of(adjectives());
    } else {
      while (other_noun == noun) other_noun = word_of(nouns());
    }
    return other_adjective + "-" + other_noun;
  }

  Random random_;
};

}  // namespace

std::unique_ptr<Generator> make_records(const TaskSetup& setup) {
  return std::make_unique<RecordsGenerator>(setup);
}

}  // namespace keyhole::tools::ruler
