// Scores of answers that list something: records as JSON, things in order.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace keyhole::tools::ruler {

/// F1 of the records of a prediction: twice the records that are exactly a reference, over all records on both sides. A
/// record is a JSON object without another one in it, wherever it stands in the text; it is a reference where names and
/// values of all fields are the same, in any order, numbers in quotation marks or without. What is not JSON is no
/// record, and a record that is repeated counts once. The references are texts of different records.
[[nodiscard]] double score_records(std::string_view prediction,
                                   const std::vector<std::string>& references);

/// The longest common subsequence of the references and the things that a prediction names, over the longer of both:
/// what is missing, too much or out of order counts alike. A thing is a word with a dash in it, of ASCII letters in any
/// case; its first mention counts. The references are different things in their right order.
[[nodiscard]] double score_ordered(std::string_view prediction,
                                   const std::vector<std::string>& references);

}  // namespace keyhole::tools::ruler
