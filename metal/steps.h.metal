// Arrays of which a text for several tokens in sequence has one for each, and a text for one token a single one.
template <int STEPS>
struct OfStep {
  template <typename A>
  auto of(A arrays, uint step) -> decltype(+arrays[0]) {
    return arrays[step];
  }
};
template <>
struct OfStep<1> {
  template <typename A>
  A of(A array, uint step) {
    return array;
  }
};
