// Records and things in order: the texts letter by letter, and answers found in them by reading.
#include <algorithm>
#include <set>

#include "tests/tools/tasks/ruler/ruler_samples.h"

namespace keyhole::tools::ruler {
namespace {

struct ReadSale {
  std::string shop;
  std::vector<std::string> numbers;  ///< receipt, units, price, lot
};

ReadSale read_sale(const std::string& line) {
  ReadSale sale{between(line, "the shop ", " sold"),
                {between(line, "Receipt ", ":"), between(line, "sold ", " units"),
                 between(line, "for ", " coins"), between(line, "lot ", ".")}};
  EXPECT_EQ(line, "Receipt " + sale.numbers[0] + ": the shop " + sale.shop + " sold " +
                      sale.numbers[1] + " units for " + sale.numbers[2] + " coins in lot " +
                      sale.numbers[3] + ".");
  return sale;
}

/// Digits that differ, where all numbers are as long; far too many where they are not.
size_t differing_digits(const ReadSale& a, const ReadSale& b) {
  size_t n = 0;
  for (size_t i = 0; i < 4; ++i) {
    if (a.numbers[i].size() != b.numbers[i].size()) return 99;
    for (size_t at = 0; at < a.numbers[i].size(); ++at) {
      n += a.numbers[i][at] != b.numbers[i][at] ? 1 : 0;
    }
  }
  return n;
}

TEST(Records, AreAmongOthersThatDifferInAWordAndADigit) {
  const auto generator = generator_of("records", setup_of(4096, 11));
  for (int i = 0; i < 3; ++i) {
    const Sample sample = generator->draw(0, 60);
    const std::string shop = between(sample.prompt, "every sale of the shop ", " as JSON");
    const std::string context = between(sample.prompt, "Memorize it.\n", "\nQuestion: ");
    EXPECT_EQ(sample.prompt,
              "A ledger follows. Memorize it.\n" + context +
                  "\nQuestion: List every sale of the shop " + shop +
                  " as JSON: an array of objects with the numbers \"receipt\", \"units\", "
                  "\"price\" and \"lot\".");
    EXPECT_EQ(sample.prefix, " Answer: All sales of the shop " + shop + ": [");
    EXPECT_TRUE(sample.follow_ups.empty());
    std::vector<ReadSale> asked, others;
    for (const std::string& line : lines_in(context)) {
      const ReadSale sale = read_sale(line);
      (sale.shop == shop ? asked : others).push_back(sale);
    }
    ASSERT_EQ(asked.size(), 4U);
    EXPECT_EQ(others.size(), 56U);
    std::vector<std::string> references;
    for (const ReadSale& sale : asked) {
      references.push_back("{\"receipt\": " + sale.numbers[0] + ", \"units\": " + sale.numbers[1] +
                           ", \"price\": " + sale.numbers[2] + ", \"lot\": " + sale.numbers[3] +
                           "}");
      for (const std::string& number : sale.numbers) EXPECT_NE(number.front(), '0');
    }
    EXPECT_EQ(sample.references, references);
    const std::string adjective = shop.substr(0, shop.find('-'));
    const std::string noun = shop.substr(shop.find('-') + 1);
    size_t same_noun = 0;
    for (const ReadSale& sale : others) {
      const bool has_adjective = sale.shop.starts_with(adjective + "-");
      const bool has_noun = sale.shop.ends_with("-" + noun);
      EXPECT_NE(has_adjective, has_noun) << sale.shop << " beside " << shop;
      same_noun += has_noun ? 1 : 0;
      size_t nearest = 99;
      for (const ReadSale& one : asked) nearest = std::min(nearest, differing_digits(sale, one));
      EXPECT_EQ(nearest, 1U);
      for (const std::string& number : sale.numbers) EXPECT_NE(number.front(), '0');
    }
    EXPECT_GT(same_noun, 10U);
    EXPECT_LT(same_noun, 46U);
  }
}

TEST(Enumerate, AsksForTheThingsOfOneColourInTheirOrder) {
  const auto generator = generator_of("enumerate", setup_of(4096, 12));
  std::set<std::string> asked_colours;
  for (int i = 0; i < 12; ++i) {
    const Sample sample = generator->draw(0, 64);
    const std::string colour = between(sample.prompt, "in the list are ", "?");
    asked_colours.insert(colour);
    std::string list;
    std::vector<std::string> of_colour;
    std::set<std::string> things, colours;
    for (const std::string& line :
         lines_in(between(sample.prompt, "Memorize it.\n", "\nQuestion: "))) {
      const std::string thing = between(line, "The ", " is ");
      const std::string own = between(line, " is ", ".");
      list += "The " + thing + " is " + own + ".\n";
      things.insert(thing);
      colours.insert(own);
      if (own == colour) of_colour.push_back(thing);
    }
    EXPECT_EQ(sample.prompt, "A list of things and their colours follows. Memorize it.\n" + list +
                                 "Question: Which things in the list are " + colour +
                                 "? Name all of them in the order in which they stand there.");
    EXPECT_EQ(sample.prefix, " Answer: The " + colour + " things, in the order of the list, are:");
    EXPECT_EQ(things.size(), 64U);
    EXPECT_EQ(of_colour.size(), 8U);
    EXPECT_EQ(sample.references, of_colour);
    for (const std::string& one : colours) {
      EXPECT_TRUE((
          std::set<std::string>{"red", "blue", "green", "yellow", "black", "white", "brown", "grey"}
              .count(one)))
          << one;
    }
    EXPECT_GE(colours.size(), 5U);
  }
  EXPECT_GE(asked_colours.size(), 3U);
}

}  // namespace
}  // namespace keyhole::tools::ruler
