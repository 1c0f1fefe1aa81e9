// Arrays of which a text for several tokens in sequence has one for each, and a text for one token a single one.
template <int STEPS>
struct OfStep {
  template <typename A>
  static auto in(A arrays, uint step) -> decltype(+arrays[0]) {
    return arrays[step];
  }
};
template <>
struct OfStep<1> {
  template <typename A>
  static A in(A array, uint step) {
    return array;
  }
};
