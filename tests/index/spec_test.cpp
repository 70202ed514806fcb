#include <string>

#include "tests/index/keys.h"

namespace keyhole::index::test {
namespace {

std::string refusal(const std::string& spec) {
  try {
    check_spec(spec);
  } catch (const Error& e) {
    EXPECT_EQ(e.status(), Status::invalid_argument) << spec;
    return e.what();
  }
  ADD_FAILURE() << spec << " was accepted";
  return "";
}

void expect_mentions(const std::string& text, const std::vector<std::string>& words) {
  for (const std::string& word : words) EXPECT_NE(text.find(word), std::string::npos) << text;
}

TEST(Spec, AcceptsTypesAloneAndWithParameters) {
  for (const char* spec :
       {"flat", "ivf", "hnsw", "ivf:C=1024,probe=32", "hnsw:M=32,ef=128",
        "ivf:train=global,center=0", "hnsw:geometry=ip", "saap", "sparq:r=16,local=8",
        "ivf:rope=undo", "saap:C=512,probe=16,partitions=own,classifier=off"}) {
    EXPECT_NO_THROW(check_spec(spec)) << spec;
  }
}

TEST(Spec, RefusalsNameTheOffenderAndTheAlternatives) {
  expect_mentions(refusal("annoy:trees=5"), {"'annoy'", "flat", "ivf", "hnsw"});
  expect_mentions(refusal(""), {"''", "flat", "ivf", "hnsw"});
  expect_mentions(refusal("IVF"), {"'IVF'", "ivf"});
  expect_mentions(refusal("ivf:nprobe=3"), {"'nprobe'", "C", "probe", "train", "segment"});
  expect_mentions(refusal("hnsw:M=1"), {"M=1", "2..512"});
  expect_mentions(refusal("hnsw:M=513"), {"M=513", "2..512"});
  expect_mentions(refusal("hnsw:geometry=cosine"), {"geometry=cosine", "lift", "ip"});
  expect_mentions(refusal("ivf:C=1024,C=2048"), {"'C'", "twice"});
  expect_mentions(refusal("flat:k=3"), {"'k'", "codec"});
}

TEST(Spec, RefusesMalformedText) {
  for (const char* spec :
       {"ivf:", "ivf:C", "ivf:C=", "ivf:=3", "ivf:C=1024,", "ivf:,C=1024", "ivf:C=1k", "ivf:C=1e3",
        "ivf:C=0x10", "ivf:C= 4", "ivf :C=4", "ivf:C=-1", "ivf:C=+4", "ivf:C=4.0",
        "ivf:C=99999999999999999999", "ivf:C=1024;probe=3", "ivf:C=1024:probe=3", "ivf:c=4"}) {
    refusal(spec);
  }
}

TEST(Spec, HelpListsEveryParameterWithItsDefault) {
  std::vector<std::string> names;
  for (const TypeHelp& type : index_types()) {
    names.push_back(type.name);
    EXPECT_FALSE(type.meaning.empty());
    for (const ParamHelp& p : type.params) {
      EXPECT_FALSE(p.meaning.empty());
      EXPECT_FALSE(p.allowed.empty());
      // The help is true: the default is accepted.
      EXPECT_NO_THROW(check_spec(type.name + ":" + p.name + "=" + p.default_value));
    }
  }
  EXPECT_EQ(names, (std::vector<std::string>{"flat", "ivf", "hnsw", "roargraph", "saap", "sparq",
                                             "codes"}));
}

TEST(Spec, EffectiveParametersBuildTheSameIndex) {
  std::mt19937 random(1);
  Keys keys(900, 64, DType::f16);
  keys.put(0, attention_keys(900, 64, random));
  const auto queries = attention_queries(3, 64, keys, random);
  for (const char* spec :
       {"flat", "ivf", "ivf:C=40,probe=3,seed=7,segment=300", "hnsw:M=6,efc=40",
        "roargraph:M=6,ef=9", "saap:C=40,probe=3", "sparq", "sparq:r=9,local=4,codec=int8"}) {
    const auto first = built(spec, keys);
    const std::string params = first->info().params;
    EXPECT_EQ(first->info().type, std::string(spec).substr(0, std::string(spec).find(':')));
    const auto second = built(params, keys);
    EXPECT_EQ(second->info().params, params);
    const Answer a = search(*first, queries, 64, 20);
    const Answer b = search(*second, queries, 64, 20);
    EXPECT_EQ(a.heads, b.heads) << spec << " and " << params;
    EXPECT_EQ(a.keys_scored, b.keys_scored);
  }
}

TEST(Spec, AutomaticValuesAreReportedAsTheyCameOut) {
  std::mt19937 random(2);
  Keys keys(1000, 64, DType::f16);
  keys.put(0, gaussian(1000, 64, random));
  const auto index = built("ivf", keys);
  const auto lists = static_cast<int>(diagnostic(*index, "lists"));
  EXPECT_GT(lists, 1);
  EXPECT_NE(index->info().params.find("C=" + std::to_string(lists) + ","), std::string::npos)
      << index->info().params;
  EXPECT_EQ(index->info().params.find("probe=0"), std::string::npos);
}

TEST(Spec, SearchParametersChangeWithoutABuild) {
  std::mt19937 random(3);
  Keys keys(900, 64, DType::f16);
  keys.put(0, attention_keys(900, 64, random));
  const auto queries = attention_queries(3, 64, keys, random);
  const char* pairs[][2] = {{"ivf:C=40,probe=3", "ivf:C=40,probe=9"},
                            {"ivf:C=40,probe=9", "ivf:probe=2,C=40"},
                            {"hnsw:M=6,efc=40,ef=12", "hnsw:M=6,efc=40,ef=100"},
                            {"roargraph:M=6,ef=10", "roargraph:M=6,ef=40"},
                            {"sparq:r=8", "sparq:local=7,r=32"},
                            {"flat", "flat"}};
  for (const auto& [from, to] : pairs) {
    SCOPED_TRACE(to);
    const auto changed = built(from, keys);
    const auto scratch = changed->make_scratch(3, 20);
    (void)search(*changed, queries, 64, 20, *scratch);
    changed->set_search_params(to);
    const auto fresh = built(to, keys);
    EXPECT_EQ(changed->info().params, fresh->info().params);
    const Answer a = search(*changed, queries, 64, 20, *scratch);
    const Answer b = search(*fresh, queries, 64, 20);
    EXPECT_EQ(a.heads, b.heads);
    EXPECT_EQ(a.keys_scored, b.keys_scored);
  }
}

TEST(Spec, WhatABuildFixedStays) {
  std::mt19937 random(4);
  Keys keys(300, 64, DType::f16);
  keys.put(0, attention_keys(300, 64, random));
  const auto index = built("ivf:C=20,probe=3", keys);
  const std::string before = index->info().params;
  const char* refused[][2] = {{"ivf:C=21,probe=3", "C=21, this index was built with 20"},
                              {"ivf:probe=3", "C=0"},
                              {"hnsw", "unknown index type"},
                              {"ivf:C=20,probe=x", "probe=x"}};
  for (const auto& [spec, part] : refused) {
    try {
      index->set_search_params(spec);
      FAIL() << spec;
    } catch (const Error& e) {
      EXPECT_EQ(e.status(), Status::invalid_argument);
      EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
    }
    EXPECT_EQ(index->info().params, before);
  }
}

TEST(Factory, RefusesShapesOutsideTheContract) {
  EXPECT_THROW(static_cast<void>(make_index("flat", 72, DType::f16, context())), Error);
  EXPECT_THROW(static_cast<void>(make_index("flat", 128, DType::i8, context())), Error);
  EXPECT_THROW(static_cast<void>(estimate_bytes("ivf:C=", 1000, 128, DType::f16)), Error);
}

TEST(Factory, IndexesRefuseKeysOfAnotherShape) {
  Keys keys(10, 64, DType::f16);
  Keys wide(10, 128, DType::f16);
  Keys fine(10, 64, DType::f32);
  for (const char* spec : {"flat", "ivf", "hnsw", "roargraph", "saap", "sparq"}) {
    const auto index = make_index(spec, 64, DType::f16, context());
    for (const Keys* other : {&wide, &fine}) {
      BuildInput input;
      input.keys = other->view();
      EXPECT_THROW(index->build(input, {}), Error);
      EXPECT_THROW(index->append(other->view(), {}), Error);
    }
    EXPECT_NO_THROW(index->append(keys.view(), {}));
  }
}

}  // namespace
}  // namespace keyhole::index::test
