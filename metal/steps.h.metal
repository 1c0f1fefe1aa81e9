// The array of one of several consecutive tokens: of arrays with one for each, or of the single one that a text for one
// token has.
template <typename T>
inline device T* of_step(device T* thread* arrays, uint step) {
  return arrays[step];
}

template <typename T>
inline device T* of_step(device T* array, uint step) {
  return array;
}
